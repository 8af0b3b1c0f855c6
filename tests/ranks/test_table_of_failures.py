"""Every way in which one rank of a class fails, on the first, the middle and the last of three: who is named for what.

The class misbehaves by itself (``tests/subjects/failing.py``); the harness's own fault injection has no part in this.
With ``pytest -s`` the verdicts and their seconds are printed as a table at the end. A hang takes the harness from 5 to
8 seconds to tell with its own limits. They hold with ``FULL_TABLE=1`` in the environment (``make stress``), where each
way to fail is tried on each rank; else limits are shorter, and one rank is tried for each, in turn (of calls that
differ, for each fourth).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from harness.cli.launched import start_pool as spread_pool
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, start_pool
from harness.scenario.model import AdamW, Build, Clip, Domain, Parameter, Part, Scenario, Step, Values, check
from harness.subjects.source import parse
from harness.verdict import Property, Stage
from tests.cli.conftest import CommandLine
from tests.spreading import Followers
from tests.subjects.failing import WAYS
from tests.support import FULL_TABLE, sampled

SUBJECT = f"{Path(__file__).parents[1] / 'subjects' / 'failing.py'}:Failing"
WORLD = 3
MIDDLE = 1
# Three buckets, two of them of 18 elements and one of 9; a clip makes a second norm.
SCENARIO = Scenario(
    world=WORLD,
    seed=7,
    parameters=(Parameter("w", (40,)), Parameter("b", (5,))),
    values=Values(Domain.EXACT, 255, 0),
    optimizer=AdamW(),
    operations=(Build(18), Part(False, (0, 1, 2), ((), (), ())), Clip(100.0), Step()),
)
# A hang is told after 5 s of waiting or 6 s of processor time, which a busy machine may take many times longer to give.
BOUND_S = 300.0


class Row(NamedTuple):
    """One way to fail. ``says``: what the message must contain, with ``{at}`` and ``{others}``."""

    how: str
    property: Property
    stage: Stage
    says: str


def _ended(how: str, says: str) -> Row:
    return Row(how, Property.PROGRESS, Stage.REDUCE, says)


def _hung(how: str, stage: Stage, says: str) -> Row:
    return Row(how, Property.PROGRESS, stage, says)


def _late(how: str, says: str) -> Row:
    return Row(f"late-{how}", Property.PROGRESS, Stage.GATHER, says)


def _differs(how: str, stage: Stage, number: str, called: str, others: str, why: str = "") -> Row:
    says = f"rank {{at}} called {called} as its {number} collective while ranks {{others}} called {others}{why}"
    return Row(how, Property.TRAFFIC, stage, says)


_AFTER_FIRST = ", after it had called its 1st collective, reduce_scatter fp32[18]"
_WAIT_FOR_SECOND = "; ranks {others} wait for its 2nd collective, reduce_scatter fp32[18]"
_STOPPED = "it was stopped by SIGSTOP or a debugger"
_WAITED = "it waited without using the processor"
_COMPUTED = "of processor time without progress"
_FINISHED = "rank {at} finished the scenario but sent no verdict: "
_SWAPPED = "rank {at} handed over bucket 1 where bucket 0 was due, unlike ranks {others}"
_RS, _AR, _AG = "reduce_scatter fp32[18]", "all_reduce fp64[1]", "all_gather bf16[6]"
_RS_LAST, _AG_LAST = "reduce_scatter fp32[9]", "all_gather bf16[3]"
_ONE_TOO_MANY = ": rank {at} called one too many"

ENDS = (
    _ended("raise", "Failing.reduce_scatter raised ValueError: planted"),
    _ended("exit-0", f"rank {{at}} sent no verdict: exit code 0{_AFTER_FIRST}"),
    _ended("exit-3", f"rank {{at}} sent no verdict: exit code 3{_AFTER_FIRST}"),
    _ended("kill", f"rank {{at}} sent no verdict: signal 9 (SIGKILL){_AFTER_FIRST}"),
    _ended("segv", f"rank {{at}} sent no verdict: signal 11 (SIGSEGV){_AFTER_FIRST}"),
    _ended("close-descriptors", "rank {at} sent no verdict: signal 6 (SIGABRT)"),
)
HANGS = (
    _hung("stop", Stage.REDUCE, _STOPPED),
    _hung("loop", Stage.REDUCE, _COMPUTED),
    _hung("loop-in-c", Stage.REDUCE, _COMPUTED),
    _ended("hang-up", "rank {at} made no progress: it closed its connection to the harness, but did not end"),
    _hung("never-call-reduce-scatter", Stage.REDUCE, _WAIT_FOR_SECOND),
    _hung("never-call-all-reduce", Stage.NORM, f"; ranks {{others}} wait for its 5th collective, {_AR}"),
    _hung("never-call-all-gather", Stage.GATHER, f"; ranks {{others}} wait for its 7th collective, {_AG}"),
    _hung("call-alone-recv", Stage.REDUCE, f"; ranks {{others}} wait for its 4th collective, {_AR}"),
)
NEVER_SENT = (
    _late("sleep", f"{_FINISHED}{_WAITED}"),
    _late("loop", f"{_FINISHED}it used "),
    _late("loop-in-c", f"{_FINISHED}it used "),
    _late("stop", f"{_FINISHED}{_STOPPED}"),
    _late("exit-0", "rank {at} sent no verdict: exit code 0, after the last stage"),
    _late("exit-3", "rank {at} sent no verdict: exit code 3, after the last stage"),
    _late("kill", "rank {at} sent no verdict: signal 9 (SIGKILL), after the last stage"),
    # Which of gloo's threads and the rank's own notices first is chance: SIGABRT, or the rank's exit.
    _late("close-descriptors", ", after the last stage"),
    _late("hang-up", f"{_FINISHED}it closed its connection to the harness, but did not end"),
    _hung("trap-in-timer", Stage.GATHER, _WAITED),
    _hung("trap-in-thread", Stage.GATHER, _COMPUTED),
)
DIFFERENCES = (
    _differs("wrong-kind-reduce-scatter", Stage.REDUCE, "2nd", "all_reduce fp32[18]", _RS),
    _differs("wrong-dtype-reduce-scatter", Stage.REDUCE, "2nd", "reduce_scatter bf16[18]", _RS),
    _differs("wrong-length-reduce-scatter", Stage.REDUCE, "2nd", "reduce_scatter fp32[21]", _RS),
    _differs("wrong-kind-all-reduce", Stage.NORM, "5th", "all_gather fp64[1]", _AR),
    _differs("wrong-dtype-all-reduce", Stage.NORM, "5th", "all_reduce fp32[1]", _AR),
    _differs("wrong-length-all-reduce", Stage.NORM, "5th", "all_reduce fp64[2]", _AR),
    _differs("wrong-kind-all-gather", Stage.GATHER, "7th", "all_reduce bf16[18]", _AG),
    _differs("wrong-dtype-all-gather", Stage.GATHER, "7th", "all_gather fp32[6]", _AG),
    _differs("wrong-bits-all-gather", Stage.GATHER, "7th", "all_gather fp16[6]", _AG),
    _differs("wrong-length-all-gather", Stage.GATHER, "7th", "all_gather bf16[7]", _AG),
    _differs("reverse-reduce-scatter", Stage.REDUCE, "1st", _RS_LAST, _RS),
    _differs("reverse-all-gather", Stage.GATHER, "6th", _AG_LAST, _AG),
    Row("swap-equal-reduce-scatter", Property.TRAFFIC, Stage.REDUCE, _SWAPPED),
    Row("swap-equal-all-gather", Property.TRAFFIC, Stage.GATHER, _SWAPPED),
    # That of two equal ones the first was left out shows when the rank comes to the next of another size.
    _differs("skip-first-reduce-scatter", Stage.REDUCE, "2nd", _RS_LAST, _RS),
    _differs("skip-middle-reduce-scatter", Stage.REDUCE, "2nd", _RS_LAST, _RS),
    _differs("skip-last-reduce-scatter", Stage.REDUCE, "3rd", _AR, _RS_LAST, ": rank {at} skipped that"),
    _differs("skip-first-all-reduce", Stage.NORM, "5th", _AG, _AR, ": rank {at} skipped that"),
    _differs("skip-first-all-gather", Stage.GATHER, "7th", _AG_LAST, _AG),
    _differs("skip-middle-all-gather", Stage.GATHER, "7th", _AG_LAST, _AG),
    _differs("skip-last-all-gather", Stage.GATHER, "8th", "nothing", _AG_LAST, ": rank {at} ended"),
    _differs("call-alone-reduce-scatter", Stage.REDUCE, "4th", _RS_LAST, _AR, _ONE_TOO_MANY),
    _differs("call-alone-all-reduce", Stage.NORM, "6th", _AR, _AG, _ONE_TOO_MANY),
    _differs("call-alone-all-gather", Stage.GATHER, "9th", _AG_LAST, "nothing", _ONE_TOO_MANY),
    _differs("call-alone-barrier", Stage.REDUCE, "4th", "barrier", _AR, _ONE_TOO_MANY),
    _differs("call-alone-broadcast", Stage.REDUCE, "4th", "broadcast fp32[1] root {at}", _AR, _ONE_TOO_MANY),
    _differs("call-alone-new-group", Stage.REDUCE, "4th", "new_group of ranks 0, 1, 2", _AR, _ONE_TOO_MANY),
    _differs("wrong-reduction-reduce-scatter", Stage.REDUCE, "2nd", f"{_RS} with MAX", _RS),
)
ROWS = (*ENDS, *HANGS, *NEVER_SENT, *DIFFERENCES)
STALL_S = None if FULL_TABLE else 2.0


def _tried(row: Row) -> tuple[int, ...]:
    """The ranks on which a way to fail is tried."""
    if FULL_TABLE:
        return tuple(range(WORLD))
    number = ROWS.index(row)
    # That calls differ is told by pure functions, which have tests of their own.
    return () if number % (4 if row in DIFFERENCES else 2) else (number // 2 % WORLD,)


CELLS = [pytest.param(row, at, id=f"{row.how}-on-{at}") for row in ROWS for at in _tried(row)]

Cells = dict[tuple[str, int], tuple[str, float]]
_outside: set[psutil.Process] = set()


@pytest.fixture(scope="module", params=["together", "apart"] if FULL_TABLE else ["together"])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks of this module's own, on which all cells run one after another, as in one campaign.

    Apart: as under torchrun, each in the care of another process, which must not change anything that is told.
    """
    _outside.update(descendants())  # of other modules
    if request.param == "together":
        with start_pool() as ranks:
            yield ranks
        return
    output = tmp_path_factory.mktemp("apart") / "output.txt"
    with Followers(WORLD, output) as followers, spread_pool(followers.launch, "gloo") as ranks:
        yield ranks
    assert output.read_text() == ""


@pytest.fixture(scope="module")
def right(pool: Pool) -> Evaluator:
    """The same class, with no rank that fails."""
    return Evaluator(parse(SUBJECT, {"at": -1}), pool)


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    """What each cell came out as; printed at the end."""
    found: Cells = {}
    yield found
    sys.stdout.write(f"\n{_table(found)}\n")


def _table(cells: Cells) -> str:
    """A line a way to fail, a column a rank: the property, the rank named, and the seconds until the verdict."""
    lines = [f"{'':<32}" + "".join(f"{f'rank {at}':<22}" for at in range(WORLD))]
    for row in ROWS:
        shown = [cells.get((row.how, at)) for at in range(WORLD)]
        if any(shown):
            texts = ["-" if cell is None else f"{cell[0]}, {cell[1]:.1f} s" for cell in shown]
            lines.append(f"{row.how:<32}" + "".join(f"{text:<22}" for text in texts))
    return "\n".join(line.rstrip() for line in lines)


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - _outside


def named(evaluation: Evaluation) -> str:
    found = evaluation.divergence
    return evaluation.conclusion.value if found is None else f"{found.property.value} {found.rank}"


def test_every_way_to_fail_has_a_row() -> None:
    assert sorted(row.how for row in ROWS) == sorted(WAYS)
    assert check(SCENARIO) is None


@pytest.mark.parametrize(("row", "at"), CELLS)
def test_the_rank_that_fails_is_named(row: Row, at: int, pool: Pool, right: Evaluator, cells: Cells) -> None:
    assert right.evaluate(SCENARIO).conclusion is Conclusion.HOLDS
    before = descendants()
    ranks = {process for process in before if process.name().startswith("z2-rank")}
    assert len(ranks) >= WORLD
    evaluator = Evaluator(parse(SUBJECT, {"how": row.how, "at": at}), pool, stall_s=STALL_S)

    started = time.monotonic()
    evaluation = evaluator.attributed(SCENARIO, evaluator.evaluate(SCENARIO))
    seconds = time.monotonic() - started
    cells[row.how, at] = named(evaluation), seconds
    after = descendants()
    afterwards = right.evaluate(SCENARIO)

    assert evaluation.conclusion is Conclusion.VIOLATED
    found = evaluation.divergence
    assert found is not None
    assert (found.property, found.rank, found.step) == (row.property, at, 0), found
    assert found.stage is row.stage, found
    others = ", ".join(str(rank) for rank in range(WORLD) if rank != at)
    assert row.says.format(at=at, others=others) in found.message
    assert [account.rank for account in evaluation.accounts] == list(range(WORLD))
    assert [account.rank for account in evaluation.accounts if account.cause] == [at]
    assert seconds < BOUND_S
    assert after <= before
    if row.property is Property.PROGRESS:
        assert not ranks & after
    assert afterwards.conclusion is Conclusion.HOLDS, afterwards.divergence
    assert len(descendants()) == len(before)


@pytest.mark.parametrize(
    ("how", "wanted", "said"),
    sampled(
        [
            ("exit-0", "progress", "exit code 0"),
            ("stop", "progress", "stopped by SIGSTOP"),
            ("skip-last-reduce-scatter", "traffic", "skipped that collective"),
        ],
        every=3,
    ),
)
def test_the_command_line_names_the_rank(how: str, wanted: str, said: str, tmp_path: Path) -> None:
    """A death, a hang and a mismatch: exit code 1, and every rank accounted for."""
    (tmp_path / "work").mkdir()
    cli = CommandLine(tmp_path / "work")
    (cli.directory / "shapes.json").write_text('[{"name": "w", "shape": [40]}, {"name": "b", "shape": [5]}]')
    arguments = ["--subject", SUBJECT, "--subject-arg", f"how={how}", "--subject-arg", f"at={MIDDLE}"]
    arguments += ["--world", str(WORLD), "--examples", "1", "--params", "shapes.json", "--bucket", "18"]

    done = cli.run("verify", *arguments, "--json", "-")

    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    failure = result["failure"]
    assert (result["verdict"], failure["property"], failure["rank"]) == ("violated", wanted, MIDDLE)
    assert said in failure["message"]
    assert [account["rank"] for account in failure["ranks"]] == list(range(WORLD))
    assert [account["cause"] for account in failure["ranks"]] == [rank == MIDDLE for rank in range(WORLD)]
    assert all(account["end"] and account["num_collectives"] >= 1 for account in failure["ranks"])
    assert list(cli.temporary.glob("zero2*")) == []
    assert cli.processes() == []
