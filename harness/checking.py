"""One saved case as an assertion, for tests of one's own: ``harness.check_case``. No torch is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from harness import inputs
from harness.evaluate import Pool, UndecidedError
from harness.report.console import describe, failure_lines
from harness.report.result import Failure
from harness.runner import CampaignOptions, replay_case
from harness.scenario import codec
from harness.scenario.model import Scenario
from harness.sim.choices import DEFAULT_ORDER, DEFAULT_SCHEDULE
from harness.subjects.source import Scalar, SubjectSource, from_case, parse, with_config

REGRESSIONS = Path(__file__).parent / "regressions"
"""Cases that each showed a bug once, in some class: all of them must hold for a class that is right."""

_DEFAULT_SUBJECT = "zero2"
_INLINE = Path("case")


class Silent:
    """An observer that shows nothing."""

    def started(self, options: CampaignOptions) -> None:
        """A campaign begins."""

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        """A scenario is about to run."""

    def shrinking(self, tried: int, best: Scenario) -> None:
        """A failing scenario is being made smaller."""

    def note(self, text: str) -> None:
        """Something the user should know."""


def check_case(
    case: Path | str | Mapping[str, Any] | Scenario,
    *,
    subject: str | None = None,
    subject_args: Mapping[str, Scalar] | None = None,
    config: Mapping[str, Any] | None = None,
    backend: str = "sim",
    device: str | None = None,
    order: str | None = None,
    schedule: str | None = None,
    timeout_s: float | None = None,
    stall_s: float | None = None,
    pool: Pool | None = None,
) -> None:
    """Run one saved case as ``replay`` does, in processes of its own, which have ended when this returns.

    Args:
        case: the path of a case file, its text, its decoded JSON, or a scenario.
        subject: as ``--subject`` has it; None: the one that the case names, as far as ``replay`` would import it.
        subject_args: further keyword arguments of its constructor.
        config: of a distribution strategy, as ``--config`` has it; None: the case's own, if it has one.
        backend: ``"sim"``, ``"gloo"`` or ``"nccl"``.
        device: ``"cpu"`` or ``"cuda"``; None: ``"cuda"`` with nccl, else ``"cpu"``.
        order, schedule: of a simulated world, see :mod:`harness.sim.choices`.
        timeout_s, stall_s: as ``--timeout`` and ``--stall``.
        pool: ranks of this backend that stay warm over many cases (:func:`harness.evaluate.start_pool`).

    Raises:
        AssertionError: it is violated; the text is what ``replay`` prints of the failure.
        UndecidedError: nothing can be said, and why.
        UsageError: the case or the subject cannot be used.
    """
    __tracebackhide__ = True  # pytest then shows the test's own line
    loaded, path = _loaded(case)
    inputs.check_choices(backend, order, schedule)
    device = inputs.chosen_device(backend, device)
    if pool is None:
        inputs.check_backend(backend, (loaded.scenario.world,), device)
    options = CampaignOptions(
        subject=_configured(_subject(loaded, subject, dict(subject_args or {})), config),
        worlds=(loaded.scenario.world,),
        backend=backend,
        device=device,
        seed=loaded.scenario.seed,
        examples=1,
        seconds=None,
        bucket=None,
        parameters=None,
        report=inputs.DEFAULT_REPORT,
        timeout_s=timeout_s,
        stall_s=stall_s,
        order=order or DEFAULT_ORDER,
        schedule=schedule or DEFAULT_SCHEDULE,
    )
    result = replay_case(loaded, path or _INLINE, options, Silent(), pool)
    if result.interrupted:
        raise KeyboardInterrupt
    what = f"{options.subject.given} on {backend}, {describe(loaded.scenario)}"
    if result.failure is not None:
        failure = result.failure
        if path is None:
            failure = msgspec.structs.replace(failure, case=None, replay=None)
        raise AssertionError(violation(what, failure))
    if result.verdict != "holds":
        raise UndecidedError(f"unknown: {what}: {result.reason}")


def violation(what: str, failure: Failure) -> str:
    """What a test says of a failure: what ``replay`` prints, without the test to paste."""
    return "\n".join([f"violated: {what}", *failure_lines(msgspec.structs.replace(failure, test=None))])


def _configured(source: SubjectSource, config: Mapping[str, Any] | None) -> SubjectSource:
    return source if config is None else with_config(source, dict(config))


def _loaded(case: Path | str | Mapping[str, Any] | Scenario) -> tuple[codec.Case, Path | None]:
    """The case, and the file that it is in."""
    if isinstance(case, Scenario):
        return codec.Case(case), None
    if isinstance(case, Mapping):
        return codec.decode(json.dumps(case).encode(), "the case"), None
    if isinstance(case, str) and case.lstrip().startswith("{"):
        return codec.decode(case.encode(), "the case"), None
    return codec.load(Path(case)), Path(case)


def _subject(case: codec.Case, given: str | None, args: dict[str, Scalar]) -> SubjectSource:
    named = case.subject
    if given is not None or named is None:
        return parse(_DEFAULT_SUBJECT if given is None else given, args)
    return from_case(named.given, named.absolute, {**named.args, **args}, named.config)
