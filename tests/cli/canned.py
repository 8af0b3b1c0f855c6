"""The command line over a runner that ends as its first argument says, so that odd endings can be tested.

Only ``run_campaign`` and ``replay_case`` are replaced: parsing, checks, output and signals are the real ones.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness import runner
from harness.cli import main
from harness.ending import raise_if_interrupted
from harness.errors import UsageError
from harness.report.result import Examples, Failure, Result, Verdict, WorldExamples, versions
from harness.runner import CampaignOptions, Observer
from harness.scenario.codec import Case
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values

SCENARIO = Scenario(
    world=1,
    seed=1,
    parameters=(Parameter("w", (2, 3)),),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(4), Part(more=False, contributors=(0,), none=((),)), Step()),
)

FAILURE = Failure(
    property="weights", step=0, stage="gather", rank=0, actual=float("nan"), case="c.json", replay="again"
)


def result(options: CampaignOptions, verdict: Verdict, **more: object) -> Result:
    """What the options ask for, with a verdict."""
    per_world = {world: WorldExamples(1, 2.0) for world in options.worlds}
    return Result(
        verdict=verdict,
        subject=options.subject.given,
        backend=options.backend,
        worlds=options.worlds,
        seed=options.seed,
        examples=Examples(run=options.examples, per_world=per_world),
        seconds=1.0,
        examples_per_second=float(options.examples),
        properties={"weights": 1},
        versions=versions(),
        **more,  # type: ignore[arg-type]
    )


def holds(options: CampaignOptions, observer: Observer) -> Result:
    """The ordinary end."""
    observer.started(options)
    for done in range(options.examples):
        observer.example(done, options.examples, 1, SCENARIO, 1.0)
    return result(options, "holds")


def violated(options: CampaignOptions, observer: Observer) -> Result:
    """A failure with a value that JSON cannot hold."""
    return result(options, "violated", failure=FAILURE)


def unknown(options: CampaignOptions, observer: Observer) -> Result:
    """Undecided, with a reason."""
    return result(options, "unknown", reason="no ranks could be started")


def bad_subject(options: CampaignOptions, observer: Observer) -> Result:
    """What only ranks find out."""
    raise UsageError("my.py:Zero2 lacks `collect`")


def bug(options: CampaignOptions, observer: Observer) -> Result:
    """An error of the harness."""
    raise KeyError("a bug\nof two lines")


def _wait() -> None:
    """Until it is interrupted; what a handler raises may be lost, as in a callback of the garbage collector."""
    while True:
        raise_if_interrupted()
        time.sleep(0.05)


def waits(options: CampaignOptions, observer: Observer) -> Result:
    """Runs until it is interrupted, as the real runner does."""
    observer.started(options)
    observer.example(0, 1, 1, SCENARIO, 0.0)
    with suppress(KeyboardInterrupt):
        _wait()
    return result(options, "unknown", reason="interrupted after 0 examples", interrupted=True)


def waits_blindly(options: CampaignOptions, observer: Observer) -> Result:
    """Does not handle the interruption itself."""
    observer.example(0, 1, 1, SCENARIO, 0.0)
    _wait()
    return result(options, "holds")


def chatty(options: CampaignOptions, observer: Observer) -> Result:
    """Prints to standard output, as does a process it starts."""
    print("printed by this process")  # noqa: T201
    subprocess.run(["echo", "printed by a child"], check=True)
    return result(options, "holds")


CANNED: dict[str, Callable[[CampaignOptions, Observer], Result]] = {
    function.__name__: function
    for function in (holds, violated, unknown, bad_subject, bug, waits, waits_blindly, chatty)
}


def replay(case: Case, path: Path, options: CampaignOptions, observer: Observer) -> Result:
    """Show which case and subject arrived."""
    observer.note(f"replay of {path}: seed {case.scenario.seed} on {options.subject}")
    return CANNED[sys.argv[1]](options, observer)


if __name__ == "__main__":
    runner.run_campaign = CANNED[sys.argv[1]]
    runner.replay_case = replay
    sys.exit(main(sys.argv[2:]))
