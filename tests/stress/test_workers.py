"""Campaigns whose workers are more than one, or are killed: whole, where shorter tests show a part of each."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from harness.museum.campaign import WorkerView
from tests.cli.test_fuzz import PATIENCE_S, Start, await_line, read
from tests.ranks.test_museum_campaign import CONTROL, ENOUGH, LONG_S, MAX, Elsewhere, Watching, WrongControl, museum

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def test_the_same_seed_gives_the_same_also_in_two_goes_and_with_more_workers(cli: CommandLine) -> None:
    words = ("fuzz", "--world", "1", "--seed", "7", "--json")
    first = cli.run(*words, "a.json", "--examples", "53", "--workers", "1", "--dir", "a")
    assert first.returncode == 0, first.stderr
    begun = cli.run(*words, "b.json", "--examples", "4", "--dir", "b", "--workers", "1")
    assert begun.returncode == 0, begun.stderr
    resumed = cli.run(*words, "b.json", "--examples", "53", "--dir", "b", "--workers", "2")
    assert resumed.returncode == 0, resumed.stderr

    results = [read(cli.directory / name) for name in ("a.json", "b.json")]
    assert [result["examples"]["run"] + result["examples"]["discarded"] for result in results] == [53, 53]
    assert [result["fuzz"]["resumed"] for result in results] == [0, 1]
    assert results[0]["fuzz"]["ids_digest"] == results[1]["fuzz"]["ids_digest"]
    assert results[0]["reached"] == results[1]["reached"]
    ids = [(cli.directory / name / "ids" / "000001.txt").read_text() for name in ("a", "b")]
    assert ids[0] == ids[1]
    assert "going on after 1 round of before" in resumed.stderr
    assert "  rounds       2, 1 of them before, kept in b, ids " in resumed.stdout

    other = cli.run("fuzz", "--world", "1", "--seed", "8", "--examples", "53", "--dir", "a")
    assert other.returncode == 2
    assert "seed was 7, is 8" in other.stderr
    assert "--fresh" in other.stderr


def killing(beneath: list[psutil.Process], **times: int) -> Callable[[Sequence[WorkerView]], None]:
    """Kill the worker that is seen to run one of these, so often (``_`` for each ``-`` of its id).

    What it had started is added to ``beneath``.
    """
    killed: set[int] = set()

    def seen(workers: Sequence[WorkerView]) -> None:
        for worker in workers:
            name = worker.exhibit.replace("-", "_")
            alive = [each for each in psutil.Process().children() if each.name() == "zero2-museum"]
            if worker.examples and times.get(name) and alive[0].pid not in killed:
                times[name] -= 1
                killed.add(alive[0].pid)
                beneath.extend(alive[0].children(recursive=True))
                alive[0].kill()

    return seen


def test_what_a_worker_was_killed_over_is_run_once_more_and_then_given_up(tmp_path: Path) -> None:
    """The control is run again from its first scenario, and holds; what two were killed over is not caught."""
    control = CONTROL["PlainZero"]
    endless = Elsewhere(**{**vars(MAX), "name": "Endless", "path": control.target})
    beneath: list[psutil.Process] = []
    watching = Watching(killing(beneath, endless=2, plain_zero=1))

    result = museum(
        tmp_path,
        watching,
        plants=(endless, MAX),
        controls=(control,),
        seconds_per_plant=LONG_S,
        control_examples=ENOUGH,
    )

    assert (result.verdict, result.exit_code, result.not_run) == ("unknown", 3, 0)
    lost, caught = result.plants
    assert (lost.reason or "").startswith("2 workers died of it; the last: worker 0 ended with signal 9 (SIGKILL)")
    assert (lost.caught, caught.caught) == (False, True)
    assert [(each.verdict, each.examples) for each in result.controls] == [("holds", ENOUGH)]
    assert len(beneath) >= 3
    assert not psutil.wait_procs(beneath, timeout=LONG_S)[1]
    assert len(watching.notes) == 3
    assert all(
        re.fullmatch(r"worker 0 ended with signal 9 \(SIGKILL\).*; another takes its place", note)
        for note in watching.notes
    )


def test_a_violation_that_was_interrupted_is_kept_and_taken_up_again(
    cli: CommandLine, start: Start, wrong: str
) -> None:
    words = ("fuzz", "--subject", f"{wrong}:Wrong", "--world", "1,2", "--seed", "1", "--workers", "1", "--dir", "d")
    running = start(*words, "--json", "r.json")
    await_line(running, "violated: ")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)

    assert running.returncode == 130
    result = read(cli.directory / "r.json")
    assert (result["verdict"], result["interrupted"]) == ("violated", True)
    assert "goes on when `fuzz` is started again" in result["failure"]["message"]
    assert (cli.directory / result["failure"]["case"]).is_file()

    again = cli.run(*words, "--json", "r.json")
    assert again.returncode == 1, again.stderr
    result = read(cli.directory / "r.json")
    assert "started again" not in result["failure"]["message"]
    assert len(list((cli.directory / "d" / "cases").iterdir())) == 1
    assert again.stdout.splitlines()[-1].split()[:5] == ["replay", "python", "-m", "harness", "replay"]


def test_a_plant_that_is_none_is_missed_or_there_was_no_time_to_say_so(
    tmp_path: Path, broken: Callable[..., Elsewhere]
) -> None:
    """The plant is a right class; a class that cannot be used is undecided."""
    halves = broken("Halves", "gradient", "reduce")
    right = Elsewhere(**{**vars(halves), "name": "Right", "path": CONTROL["PlainZero"].target})
    unusable = Elsewhere(**{**vars(halves), "name": "NotThere", "path": halves.path.replace(":Halves", ":NotThere")})

    result = museum(tmp_path, Watching(), plants=(right, unusable), seconds_per_plant=2.0)

    missed, not_there = result.plants
    assert (missed.caught, missed.found_after, missed.failure) == (False, None, None)
    assert missed.undecided == (missed.examples < ENOUGH)
    assert (result.verdict, result.not_run) == ("unknown" if missed.undecided else "violated", 0)
    assert (not_there.caught, not_there.undecided, not_there.examples) == (False, True, 0)
    assert "NotThere" in (not_there.reason or "")


def test_a_false_alarm_fails_the_run(tmp_path: Path, broken: Callable[..., Elsewhere]) -> None:
    """The control is a broken class."""
    alarm = WrongControl("Halves", "not right at all", path=broken("Halves", "gradient", "reduce").path)

    result = museum(tmp_path, Watching(), controls=(alarm,), seconds_per_plant=LONG_S, control_examples=30)

    assert (result.verdict, result.exit_code, result.not_run) == ("violated", 1, 0)
    (false_alarm,) = result.controls
    assert false_alarm.verdict == "violated"
    assert false_alarm.failure is not None
    assert (false_alarm.failure.stage, result.summary.false_alarms) == ("reduce", 1)
    assert false_alarm.failure.ranks is None
    assert Path(false_alarm.failure.case or "").is_file()
