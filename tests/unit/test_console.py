"""What a person reads: the summary, the failure block and progress, rendered to text and compared as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from harness.report.console import (
    LINE_INTERVAL_S,
    OUTPUT_LINES,
    ProgressReport,
    describe,
    duration,
    failure_lines,
    print_result,
    result_lines,
    visible,
)
from harness.report.result import Examples, Failure, Result, WorldExamples
from harness.scenario.model import AdamW, Build, Clip, Discard, Domain, Parameter, Part, Scenario, Step, Values


def part() -> Part:
    return Part(more=False, contributors=(0, 1, 2), none=((), (), ()))


SCENARIO = Scenario(
    world=3,
    seed=1,
    parameters=(Parameter("a", (1000, 2)), Parameter("b", ())),
    values=Values(Domain.EXACT, 3, 0),
    optimizer=AdamW(),
    operations=(Build(64), part(), Step(), part(), part(), Clip(1.0), Step(), part(), Discard()),
)

HOLDS = Result(
    verdict="holds",
    subject="zero2",
    backend="gloo",
    worlds=(1, 3),
    seed=77,
    examples=Examples(run=300, discarded=2, per_world={3: WorldExamples(150, 12.34), 1: WorldExamples(150, 90.0)}),
    seconds=65.4,
    examples_per_second=4.587,
    oracle={"exact": 1200, "ordered": 80},
    properties={"weights": 300, "moments": 0, "agreement": 299},
    reached={"world-3": 10, "one-bucket": 1},
)

FAILURE = Failure(
    property="gradient",
    step=2,
    stage="reduce",
    rank=1,
    parameter="layers.0.weight",
    element=17,
    bucket=0,
    owner=1,
    expected=0.5,
    actual="nan",
    expected_bits="0x3f000000",
    actual_bits="0x7fc00000",
    ulps=1,
    mismatches=1200,
    message="the reduced gradient differs",
    output="one\ntwo\n",
    case="/tmp/a dir/case.json",
    replay="zero2-harness replay '/tmp/a dir/case.json'",
)


def text(result: Result, **options: Any) -> str:
    stream = io.StringIO()
    print_result(stream, result, **options)
    return stream.getvalue()


def test_summary_of_a_campaign_that_holds() -> None:
    """Verdict, counts per world in order, what was checked and what not, oracles, situations: exactly these lines."""
    assert text(msgspec.structs.replace(HOLDS, missing=("held", "spilled"))) == (
        "holds: zero2 on gloo, world 1,3, 300 examples in 1:05 (4.6/s), 2 discarded, seed 77\n"
        "  world 1      150 examples, 90.0/s\n"
        "  world 3      150 examples, 12.3/s\n"
        "  checked      weights 300, agreement 299\n"
        "  not checked  master, moments, gradient, norm, clip, spill, intake, storage, ownership, memory, traffic, "
        "progress, determinism, invariance\n"
        "  oracles      exact 1,200, ordered 80, bound 0, loose 0\n"
        "  reached      2 situations\n"
        "  not reached  held, spilled\n"
    )


def test_what_was_only_judged_by_the_bound_is_explained() -> None:
    ordered = text(HOLDS)
    bound = text(msgspec.structs.replace(HOLDS, oracle={"exact": 3, "bound": 2}))

    assert "  oracles      exact 3, ordered 0, bound 2, loose 0\n  bound        no fixed order" in bound
    assert "  bound  " not in ordered


def test_failure_block_labels_everything_and_ends_with_the_replay_command() -> None:
    """One label a line; values with their bits and distance; what ranks printed; the command last, never wrapped."""
    printed = text(msgspec.structs.replace(HOLDS, verdict="violated", failure=FAILURE, missing=("held",)))
    assert "not checked" not in printed
    assert "not reached" not in printed
    block = printed[printed.index("\nfailure\n") + 1 :]
    assert block == (
        "failure\n"
        "  property     gradient\n"
        "  step         2\n"
        "  stage        reduce\n"
        "  rank         1\n"
        "  parameter    layers.0.weight\n"
        "  element      17\n"
        "  bucket       0\n"
        "  owner        rank 1\n"
        "  expected     0.5 (bits 0x3f000000)\n"
        "  actual       nan (bits 0x7fc00000, 1 ulp off)\n"
        "  mismatches   1,200 elements\n"
        "  message      the reduced gradient differs\n"
        "  output       from the ranks:\n"
        "    | one\n"
        "    | two\n"
        "  case         /tmp/a dir/case.json\n"
        "  replay       zero2-harness replay '/tmp/a dir/case.json'\n"
    )


def test_failure_block_says_where_mismatches_lie_and_what_they_look_like() -> None:
    """The place of a parameter and of an element in all of them, beside what is counted inside."""
    failure = Failure(
        property="gradient",
        parameter="w",
        index=3,
        element=17,
        offset=1017,
        pattern="12 of 40 elements, on rank 1",
        inputs="agreed: all was right",
        symptom="a part is missing (part 1)",
    )
    assert failure_lines(failure) == [
        "failure",
        "  property     gradient",
        "  parameter    w (number 3 of the list)",
        "  element      17 (offset 1,017 of all)",
        "  pattern      12 of 40 elements, on rank 1",
        "  inputs       agreed: all was right",
        "  symptom      a part is missing (part 1)",
    ]


def test_failure_block_leaves_out_what_does_not_apply() -> None:
    """A zero is a value (step 0, rank 0, element 0), None is not."""
    lines = failure_lines(Failure(property="progress", step=0, rank=0, element=0, message="rank 0 hung"))
    assert lines == [
        "failure",
        "  property     progress",
        "  step         0",
        "  rank         0",
        "  element      0",
        "  message      rank 0 hung",
    ]


def test_a_test_to_paste_stands_at_the_margin_before_the_replay_command() -> None:
    test = "from harness import check_case\n\n\ndef test_case():\n    check_case('a.json')\n"
    lines = failure_lines(Failure(property="progress", case="a.json", test=test, replay="harness replay a.json"))
    assert (
        lines[-9:]
        == [
            "  case         a.json",
            "  test         paste this into a file of tests:",
            "",
            *test.splitlines(),
            "",
            "  replay       harness replay a.json",
        ][-9:]
    )
    assert "\n".join(lines).count(test) == 1


def test_long_output_is_cut_to_its_end() -> None:
    """The last lines say what happened; how many there were is said."""
    output = "\n".join(f"line {number}" for number in range(100))
    lines = failure_lines(Failure(property="progress", output=output))
    shown = [line for line in lines if line.startswith("    | ")]
    assert len(shown) == OUTPUT_LINES
    assert shown[-1] == "    | line 99"
    assert f"the last {OUTPUT_LINES} of 100 lines" in lines[2]


def test_unknown_says_why_and_interrupted_says_so() -> None:
    """A verdict that is none must never look like one."""
    lines = result_lines(msgspec.structs.replace(HOLDS, verdict="unknown", reason="no ranks", interrupted=True))
    assert lines[0][0].startswith("unknown, interrupted: zero2")
    assert lines[1][0] == "  reason       no ranks"


def test_a_replay_shows_no_campaign_counts() -> None:
    """Rates and situations of a single case say nothing."""
    printed = text(HOLDS, campaign=False)
    assert "reached" not in printed
    assert "  world " not in printed
    assert "checked      weights 300" in printed


def test_text_of_a_subject_cannot_control_the_terminal() -> None:
    """Escape sequences and markup come out as the characters they are."""
    printed = text(
        msgspec.structs.replace(HOLDS, failure=Failure(property="progress", message="\x1b[2J[red]x[/red]\r"))
    )
    assert "\\x1b[2J[red]x[/red]\\r\n" in printed
    assert "\x1b" not in printed


def test_visible_keeps_ordinary_text() -> None:
    """Letters of any language and line breaks stay, tabs become spaces, surrogates are escaped."""
    assert visible("é 漢\n\tx\udce9\x00") == "é 漢\n    x\\udce9\\x00"


def test_long_lines_are_not_wrapped() -> None:
    """A path broken in two cannot be copied."""
    path = "/long/" + "x y " * 100
    assert f"  case         {path}\n" in text(
        msgspec.structs.replace(HOLDS, failure=Failure(property="progress", case=path))
    )


def test_describe_names_sizes_and_special_operations() -> None:
    """A scenario in one line."""
    assert describe(SCENARIO) == (
        "world 3, 2 parameters of 2,001, bucket 64, 3 steps (1,2,1 parts), exact, clip, discard"
    )


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-1.0, "0.0 s"), (0.44, "0.4 s"), (12.4, "12 s"), (59.6, "1:00"), (185, "3:05"), (3723, "1:02:03")],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@dataclass
class Bounded:
    seconds: float | None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(seconds: float | None, drive: Callable[[ProgressReport, Clock], None]) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with ProgressReport(stream, clock=clock) as progress:
        progress.started(Bounded(seconds))
        drive(progress, clock)
    return stream.getvalue().splitlines()


def test_without_a_terminal_progress_is_a_plain_line_now_and_then() -> None:
    """The first example is announced at once, later ones only after the interval: a log must not fill up."""

    def drive(progress: ProgressReport, clock: Clock) -> None:
        progress.example(0, 300, 3, SCENARIO, 0.0)
        clock.now += LINE_INTERVAL_S / 2
        progress.example(40, 300, 3, SCENARIO, 20.0)
        clock.now += LINE_INTERVAL_S / 2
        progress.example(100, 300, 3, SCENARIO, 20.0)

    assert plain(None, drive) == [
        f"0/300 examples, starting, {describe(SCENARIO)}",
        f"100/300 examples, 20.0 examples/s, 10 s left, {describe(SCENARIO)}",
    ]


def test_time_left_is_the_nearer_of_both_bounds() -> None:
    """100 examples at 1 a second would take longer than the 30 seconds given, of which 20 are left."""

    def drive(progress: ProgressReport, clock: Clock) -> None:
        clock.now += 10
        progress.example(0, 100, 3, SCENARIO, 1.0)

    assert plain(30.0, drive) == [f"0/100 examples, 1.0 examples/s, 20 s left, {describe(SCENARIO)}"]


def test_shrinking_and_notes_are_shown() -> None:
    """A note is printed at once; shrinking keeps to the interval."""

    def drive(progress: ProgressReport, clock: Clock) -> None:
        progress.note("found a [violation]")
        progress.shrinking(3, SCENARIO)
        progress.shrinking(4, SCENARIO)

    assert plain(None, drive) == [
        "found a [violation]",
        f"shrinking: 3 tried, smallest so far: {describe(SCENARIO)}",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_one_bar_and_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar shows count, rate, time left and what is tried; afterwards the cursor is visible again."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with ProgressReport(stream) as progress:
        progress.started(Bounded(None))
        progress.example(120, 300, 3, SCENARIO, 60.0)
        assert progress._live is not None
        progress._live.refresh()
    shown = stream.getvalue()
    for piece in ("120/300", "60.0 examples/s", "3.0 s left", "world 3, 2 parameters of 2,001"):
        assert piece in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cursor movement a live bar is a mess."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressReport(stream) as progress:
        progress.example(1, 2, 3, SCENARIO, 1.0)
    assert stream.getvalue().startswith("1/2 examples")
