"""How a museum looks on a terminal and in a log."""

from __future__ import annotations

import io
from typing import Any

from msgspec.structs import replace

from harness.museum import show
from harness.museum.campaign import WorkerView
from harness.museum.judging import Judgement, Naming
from harness.museum.score import CaseSize, ControlOutcome, MuseumResult, PlantOutcome, summarise, verdict_of
from harness.report.result import Failure, FoundAfter

RIGHT = PlantOutcome(
    id="rounds-partial-sum-at-world-three",
    kind="rounding and dtype",
    bugs=("a/b#1",),
    properties=("determinism",),
    stages=("gather", "update"),
    symptoms=("a part is missing",),
    seed=1,
    caught=True,
    found_after=FoundAfter(seconds=0.25, examples=4),
    examples=4,
    seconds=1.5,
    case=CaseSize(world=2, parameters=1, elements=3, bucket=4, steps=1, parts=2),
    failure=Failure(property="determinism", stage="update", symptom="a part is missing (part 1)", rank=0),
    judgement=Judgement(location=True, naming=Naming.RIGHT, place=None),
)
MISSED = PlantOutcome(
    id="max-of-norms",
    kind="norm and clipping",
    bugs=("a/b#2",),
    properties=("norm",),
    stages=("norm",),
    symptoms=(),
    seed=2,
    examples=400,
    seconds=20.0,
)
HOLDS = ControlOutcome(id="plain-zero", seed=1, verdict="holds", examples=300, seconds=3.0)
ALARM = ControlOutcome(
    id="adds-pairwise", seed=2, verdict="violated", examples=2, seconds=4.0, failure=Failure(property="norm", rank=1)
)
UNDECIDED = ControlOutcome(id="refreshes", seed=3, verdict="unknown", reason="no example was run")


def result(*plants: PlantOutcome, controls: tuple[ControlOutcome, ...] = (), **fields: Any) -> MuseumResult:
    summary = summarise(plants, controls, left_out=3)
    given: dict[str, Any] = {
        "verdict": verdict_of(summary, complete=True),
        "backend": "sim",
        "worlds": (1, 2),
        "seed": 7,
        "workers": 2,
        "seconds_per_plant": 20.0,
        "examples_per_control": 300,
        "seconds": 75.0,
        "report": "cases",
    }
    return MuseumResult(summary=summary, plants=plants, controls=controls, **{**given, **fields})


def shown(*plants: PlantOutcome, controls: tuple[ControlOutcome, ...] = (), **fields: Any) -> list[str]:
    return [line for line, _ in show.result_lines(result(*plants, controls=controls, **fields))]


def rows(*plants: PlantOutcome) -> list[str]:
    """The table alone, without what is said of its columns."""
    lines = shown(*plants)
    return lines[: lines.index("")]


def test_a_row_has_what_was_told_and_what_it_took() -> None:
    lines = shown(replace(RIGHT, id="any-of"))
    assert lines[1] == "rounding and dtype"
    assert lines[2].split() == ["any-of", "0.25", "4", "w2", "e3", "s1", "determinism@update", "right"]
    assert lines[-1] == (
        "holds: 1 of 1 plant caught (median 0.25 s, slowest 0.25 s); property and stage right for 100 %, "
        "symptom for 100 % (0 wrong); sim, 1:15, seed 7"
    )


def test_rows_fit_a_terminal_and_their_columns_stay_where_they_are() -> None:
    wide = CaseSize(world=4, parameters=1, elements=1234, bucket=4, steps=10, parts=20)
    long = replace(RIGHT, id="n" * 60)
    slow = replace(RIGHT, id="slow", found_after=FoundAfter(seconds=1234.5, examples=12345))
    none = replace(RIGHT, id="none", judgement=Judgement(location=True, naming=Naming.NONE, place=None))
    lines = rows(RIGHT, long, slow, none, replace(RIGHT, id="any-of", case=wide, cut_short=True))

    assert all(len(line) <= 80 for line in lines)
    assert f"  {long.id}" in lines
    assert {line.index("determinism@") for line in lines if "determinism@" in line} == {lines[0].index("told")}
    (cut,) = (line.split() for line in lines if "any-of" in line)
    assert cut[3:6] == ["w4", "e1234", "s10+"]
    assert next(line for line in lines if line.startswith("  none")).endswith("@update -")
    assert all(len(line) <= 80 for line in show._LEGEND)


def test_what_was_not_made_smaller_to_the_end_is_counted() -> None:
    assert "  cut short       1 case (+) may not be the smallest" in shown(
        RIGHT, replace(RIGHT, id="x", cut_short=True)
    )
    assert not any(line.startswith("  cut short") for line in shown(RIGHT))


def test_plants_are_grouped_by_kind_and_what_was_missed_says_so() -> None:
    lines = shown(RIGHT, MISSED, replace(RIGHT, id="another"))
    kinds = [line for line in lines if line in ("norm and clipping", "rounding and dtype")]
    assert kinds == ["norm and clipping", "rounding and dtype"]
    row = next(number for number, line in enumerate(lines) if line.startswith("  max-of-norms"))
    assert "NOT CAUGHT" in lines[row]
    assert lines[row + 1].strip() == "nothing was found in 400 examples in 20 s"
    assert lines[-1].startswith("violated: 2 of 3 plants caught (")


def test_what_is_undecided_says_why_and_how_to_repeat_it_with_more_time() -> None:
    few = replace(MISSED, id="few", examples=4, undecided=True, reason="only 4 examples in 20 s")
    lines = shown(RIGHT, few, MISSED, controls=(UNDECIDED,))
    row = next(number for number, line in enumerate(lines) if line.startswith("  few"))
    assert lines[row].split() == ["few", "undecided"]
    assert lines[row + 1].strip() == "undecided: only 4 examples in 20 s"
    assert [line for line in lines if " -m harness museum " in line] == [
        "  once more       python -m harness museum --plant few --plant max-of-norms --backend sim --seed 7 "
        "--seconds-per-plant 60"
    ]
    assert any(
        line.strip()
        == "python -m harness verify --subject museum:refreshes --backend sim --seed 3 --examples 300 --seconds 60"
        for line in lines
    )
    assert "1 of 3 plants caught (median 0.25 s, slowest 0.25 s), 1 undecided, " in lines[-1]
    assert shown(RIGHT, few)[-1].startswith("unknown: ")


def test_where_cases_are_and_how_to_replay_one() -> None:
    told = replace(RIGHT.failure, case="cases/case-1.json", replay="python -m harness replay cases/case-1.json")
    saved = replace(RIGHT, failure=told)
    few = shown(saved, RIGHT)
    assert "  cases           saved in cases" in few
    assert "  replay          python -m harness replay cases/case-1.json" in few
    many = shown(*(replace(saved, id=str(number)) for number in range(4)))
    (line,) = (line for line in many if line.startswith("  replay"))
    assert "python -m harness replay CASE --subject museum:ID --backend sim" in line
    assert not any(line.startswith("  cases") for line in shown(RIGHT))


def test_each_thing_that_is_not_as_labelled_has_a_line() -> None:
    wrong = replace(RIGHT, judgement=Judgement(location=False, naming=Naming.WRONG, place=False))
    lines = [line.strip() for line in shown(wrong)]
    assert "PROPERTY, STAGE: told determinism at update, right is determinism at gather or update" in lines
    assert "SYMPTOM: told 'a part is missing (part 1)', right is 'a part is missing'" in lines
    assert "RANK, PARAMETER: told rank 0; it is not there" in lines
    words = ("PROPERTY", "SYMPTOM", "RANK")
    assert not any(line.startswith(words) for line in map(str.strip, shown(RIGHT)))
    unread = [line.strip() for line in shown(replace(RIGHT, judgement=None))]
    assert "not judged: its case could not be saved and read again" in unread


def test_what_does_not_apply_is_left_out() -> None:
    lines = shown(controls=(HOLDS,))
    assert lines[-1] == "holds: 0 false alarms on 1 control (300 examples); sim, 1:15, seed 7"
    assert not any("0 of 0" in line or "plant" in line for line in lines)
    assert "  plants          1, for 1 public bug; 3 more are left out" in shown(RIGHT)


def test_a_false_alarm_is_shown_whole_and_an_undecided_control_with_its_reason() -> None:
    lines = shown(RIGHT, controls=(HOLDS, ALARM, UNDECIDED))
    found = {line.split()[0]: line for line in lines if line.startswith("  ") and line.strip()}
    assert found["plain-zero"].endswith("holds       300 examples in 3.0 s")
    assert "FALSE ALARM" in found["adds-pairwise"]
    assert "      property     norm" in lines
    assert found["refreshes"].endswith("undecided   0 examples in 0.0 s")
    assert lines[lines.index(found["refreshes"]) + 1].strip() == "no example was run"
    assert "1 false alarm on 3 controls (302 examples), 1 undecided; " in lines[-1]
    assert found["false"] == "  false alarms    1 on 3 controls (302 examples), 1 undecided"


def test_a_partial_result_says_that_it_is_one() -> None:
    lines = shown(RIGHT, verdict="unknown", interrupted=True, not_run=5)
    assert "  not run         5 exhibits" in lines
    assert lines[-1].startswith("unknown, interrupted: 1 of 1 plant caught")
    assert "  reason          no worker" in shown(verdict="unknown", reason="no worker")


def test_a_share_is_100_percent_only_if_it_is_all() -> None:
    plants = [replace(RIGHT, id=str(number)) for number in range(299)]
    plants.append(replace(RIGHT, judgement=Judgement(location=False, naming=Naming.RIGHT, place=None)))
    assert "property and stage right for 99 %" in shown(*plants)[-1]


def test_what_only_simulated_worlds_show_is_one_line() -> None:
    assert show.left_to_sim(1) == "1 plant left out: races, which only simulated worlds show; --backend sim runs them"


def test_elsewhere_than_on_a_terminal_each_exhibit_is_a_line() -> None:
    stream = io.StringIO()
    with show.MuseumProgress(stream) as progress:
        progress.began(3, 2)
        progress.view([WorkerView(0, "max-of-norms", 3, 0.5, "world 2")])
        for outcome in (RIGHT, MISSED, ALARM):
            progress.done(outcome)
        progress.note("worker 1 ended")
    assert stream.getvalue().splitlines() == [
        "3 exhibits, 2 workers",
        f"1/3 {RIGHT.id}: caught after 0.25 s, 4 examples, determinism@update",
        "2/3 max-of-norms: NOT CAUGHT, 400 examples in 20 s",
        "3/3 adds-pairwise (control): FALSE ALARM, 2 examples in 4.0 s",
        "worker 1 ended",
    ]


def test_the_live_table_has_a_row_for_each_worker() -> None:
    table = show.workers_table(
        [WorkerView(0, "max-of-norms", 3, 0.5, "world 2"), WorkerView(1, "", 0, 0.0, "starting")]
    )
    assert [[str(cell) for cell in column.cells] for column in table.columns] == [
        ["0", "1"],
        ["max-of-norms", ""],
        ["3", "0"],
        ["0.5 s", ""],
        ["world 2", "starting"],
    ]
