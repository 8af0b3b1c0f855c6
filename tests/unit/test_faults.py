"""The language of faults: saved, read, refused, drawn and shrunk, and what each must turn into."""

from __future__ import annotations

import functools
import json
import typing
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from harness.errors import CaseError
from harness.faults import language
from harness.faults.expect import HOLDS, expectation, unhit
from harness.faults.language import (
    Corrupt,
    Delay,
    Duplicate,
    Exit,
    Fault,
    Hang,
    Kill,
    Mute,
    Raise,
    Skip,
    Slow,
    Stop,
    kind,
)
from harness.scenario import codec
from harness.scenario.aims import FREE, for_fault
from harness.scenario.codec import Case, decode, encode
from harness.scenario.generate import draw
from harness.scenario.model import (
    AdamW,
    Build,
    Discard,
    Domain,
    Parameter,
    Part,
    Scenario,
    Step,
    Values,
    check,
    steps,
)
from harness.scenario.model import Skip as SkipUpdate
from harness.scenario.space import Choices, draw_fault, draw_scenario
from harness.verdict import Property, Stage

PART = Part(False, (0, 1), ((), ()))
SCENARIO = Scenario(
    world=2,
    seed=5,
    parameters=(Parameter("w", (3, 4)),),
    values=Values(Domain.EXACT, max_k=255, exponent=-3),
    optimizer=AdamW(),
    operations=(Build(4), PART, Step(), PART, Discard(), PART, Step()),
)
EVERY_KIND: tuple[Fault, ...] = (
    Kill(rank=0, step=0, stage=Stage.REDUCE, collective=1, signal=15),
    Exit(rank=1, step=None, stage=Stage.BUILD, code=3),
    Raise(rank=1, step=1, stage=Stage.COLLECT),
    Stop(rank=0, step=2, stage=Stage.UPDATE),
    Hang(rank=0, step=0, stage=Stage.NORM, collective=0, how="native"),
    Mute(rank=1),
    Slow(rank=0, step=2, stage=Stage.GATHER, milliseconds=3),
    Delay(rank=0, step=None, stage=Stage.BUILD, collective=0, milliseconds=2_000),
    Skip(rank=1, step=0, stage=Stage.REDUCE, collective=2),
    Duplicate(rank=0, step=0, stage=Stage.REDUCE, collective=0),
    Corrupt(rank=0, step=0, stage=Stage.REDUCE, collective=0, what="slice"),
)


def with_faults(*faults: Fault) -> Scenario:
    return replace(SCENARIO, faults=faults)


# --- case files -------------------------------------------------------------------------------------------------------


def test_every_kind_is_here() -> None:
    assert {type(fault) for fault in EVERY_KIND} == set(typing.get_args(Fault))


def test_faults_are_read_back_as_they_were_written() -> None:
    case = Case(with_faults(*EVERY_KIND))

    assert check(case.scenario) is None
    assert decode(encode(case)) == case


def test_each_fault_is_a_line_of_the_file() -> None:
    lines = encode(Case(with_faults(EVERY_KIND[8], Mute(rank=1)))).decode().splitlines()

    assert lines[-5:] == [
        '  "faults": [',
        '    {"fault": "skip", "rank": 1, "step": 0, "stage": "reduce", "collective": 2},',
        '    {"fault": "mute", "rank": 1}',
        "  ]",
        "}",
    ]


def test_a_scenario_without_faults_is_written_as_before_there_were_any() -> None:
    assert "faults" not in json.loads(encode(Case(SCENARIO)))
    assert decode(encode(Case(SCENARIO))).scenario.faults == ()


SKIP = {"fault": "skip", "rank": 1, "step": 0, "stage": "reduce", "collective": 2}
HANG = {"fault": "hang", "rank": 1, "step": 0, "stage": "reduce", "collective": None, "how": "sleep"}
KILL = {"fault": "kill", "rank": 1, "step": 0, "stage": "norm"}
CHOICES = ", ".join(repr(kind(fault)) for fault in EVERY_KIND)


@pytest.mark.parametrize(
    ("faults", "line"),
    [
        ([SKIP, {**SKIP, "fault": "explode"}], f"$.faults[1].fault: expected one of {CHOICES}, got 'explode'"),
        ([{**SKIP, "stage": "lunch"}], "$.faults[0].stage: expected one of 'build', 'collect', 'reduce', "),
        ([{**HANG, "how": "gently"}], "$.faults[0].how: expected one of 'sleep', 'python', 'native', got 'gently'"),
        ([{**SKIP, "collective": None}], "$.faults[0].collective: expected `int`, got `null`"),
        ([{name: SKIP[name] for name in SKIP if name != "collective"}], "$.faults[0]: object missing required field"),
        ([{**SKIP, "often": 3}], "$.faults[0]: object contains unknown field `often`"),
        ([{**SKIP, "rank": -1}], "$.faults[0].rank: expected `int` >= 0"),
        ([{**SKIP, "fault": "delay", "milliseconds": 2_001}], "$.faults[0].milliseconds: expected `int` <= 2000"),
        ([{**KILL, "signal": 0}], "$.faults[0].signal: expected `int` >= 1"),
        ([SKIP] * 17, "$.faults: expected `array` of length <= 16"),
        # Well-formed, but it could never strike.
        ([{**SKIP, "rank": 2}], "$.faults[0].rank: expected a rank below the world of 2, got 2"),
        ([SKIP, {**SKIP, "step": 3}], "$.faults[1].step: expected a step below 3, got 3"),
        (
            [{**SKIP, "step": 1}],
            "$.faults[0].stage: step 1, a discarded one, has the stages 'collect', 'update', got 'reduce'",
        ),
        ([{**SKIP, "stage": "build"}], "$.faults[0].stage: step 0 has the stages 'collect', "),
        ([{**SKIP, "step": None}], "$.faults[0].stage: without a step expected 'build', got 'reduce'"),
        ([{**KILL, "signal": 19}], "$.faults[0].signal: expected one that ends a process, got 19"),
    ],
)
def test_a_bad_fault_gives_its_path_and_what_is_wrong(faults: list[dict[str, Any]], line: str) -> None:
    data = {**json.loads(encode(Case(SCENARIO))), "faults": faults}

    with pytest.raises(CaseError) as caught:
        codec.decode(json.dumps(data).encode(), "c.json")

    assert str(caught.value).startswith(f"c.json: {line}")


# --- what a fault must turn into --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", EVERY_KIND, ids=kind)
def test_lateness_must_hold_and_all_else_is_a_violation_at_its_rank(fault: Fault) -> None:
    expected = expectation(fault, SCENARIO)

    if isinstance(fault, Slow | Delay):
        assert expected == HOLDS
    else:
        assert expected.rank == fault.rank
        assert expected.properties
        assert expected.properties <= {item.value for item in Property}


def test_a_fault_of_a_rank_that_is_not_there_has_no_expectation() -> None:
    with pytest.raises(ValueError, match="world 2"):
        expectation(Mute(rank=2), SCENARIO)


def test_a_fault_that_never_struck_is_told() -> None:
    slow, delay = EVERY_KIND[6], EVERY_KIND[7]
    scenario = with_faults(slow, delay, Mute(rank=1))

    assert unhit(scenario, {}) == [slow, delay, Mute(rank=1)]
    assert unhit(scenario, {0: (1,), 1: (0,)}) == [slow, Mute(rank=1)]  # a hit on another rank is none
    assert unhit(scenario, {0: (0, 1)}) == [Mute(rank=1)]


def test_a_fault_after_one_that_ends_the_scenario_need_not_strike() -> None:
    scenario = with_faults(EVERY_KIND[6], Mute(rank=1))

    assert unhit(scenario, {1: (1,)}) == []


# --- drawing ----------------------------------------------------------------------------------------------------------

WORLDS = (1, 2, 3)


@functools.cache
def drawn() -> tuple[Scenario, ...]:
    return tuple(draw(3, index, WORLDS, fault=True) for index in range(400))


def test_every_drawn_scenario_has_one_fault_that_can_show() -> None:
    for scenario in drawn():
        assert check(scenario) is None
        assert scenario.values.domain is not Domain.GENERAL
        assert len(scenario.faults) == 1


def test_faults_of_every_kind_and_stage_are_drawn_on_every_rank() -> None:
    faults = [scenario.faults[0] for scenario in drawn()]

    assert set(map(type, faults)) == set(typing.get_args(Fault))
    assert {fault.stage for fault in faults if not isinstance(fault, Mute)} == set(Stage)
    assert {fault.rank for fault in faults} == {0, 1, 2}
    assert {fault.what for fault in faults if isinstance(fault, Corrupt)} == {"bit", "slice", "nan"}
    assert {fault.how for fault in faults if isinstance(fault, Hang)} == {"sleep", "python", "native"}
    assert min(Counter(map(kind, faults)).values()) >= 10


def test_one_rank_alone_gets_no_fault_of_a_collective() -> None:
    alone = [scenario.faults[0] for scenario in drawn() if scenario.world == 1]

    assert len(alone) > 100
    assert not [fault for fault in alone if isinstance(fault, Slow | Delay | Skip | Duplicate | Corrupt)]
    assert not [fault for fault in alone if getattr(fault, "collective", None) is not None]


def test_only_the_first_collective_is_named_and_none_of_a_discarded_step() -> None:
    for scenario in drawn():
        fault = scenario.faults[0]
        number = getattr(fault, "collective", None)
        assert number in (None, 0)
        if number == 0 and not isinstance(fault, Mute) and fault.step is not None:
            assert not list(steps(scenario))[fault.step].discard


def test_what_is_corrupted_reaches_an_element_and_shows() -> None:
    found = [scenario for scenario in drawn() if isinstance(scenario.faults[0], Corrupt)]

    for scenario in found:
        fault = scenario.faults[0]
        assert isinstance(fault, Corrupt)
        assert fault.stage in (Stage.REDUCE, Stage.NORM, Stage.GATHER)
        assert fault.rank == 0 or fault.stage is not Stage.GATHER
        if fault.what != "nan":
            assert fault.stage is not Stage.NORM
            # The 2.0 that a flipped bit makes of a zero is at least an ulp of what is added up.
            total = sum(len(part.contributors) for part in max((plan.parts for plan in steps(scenario)), key=len))
            largest = total * scenario.values.max_k * 2.0**scenario.values.exponent
            assert fault.stage is Stage.GATHER or largest < 2**25


def test_the_same_seed_draws_the_same_faults() -> None:
    assert [draw(3, index, WORLDS, fault=True) for index in range(0, 400, 50)] == list(drawn()[::50])


def test_in_a_skipped_step_nothing_strikes_after_the_norm() -> None:
    """Nothing of the subject's is called there, so a fault would never strike and the run show nothing."""
    skipped = replace(SCENARIO, operations=(Build(4), PART, SkipUpdate(), PART, Step()))
    for stage, allowed in ((Stage.REDUCE, True), (Stage.NORM, True), (Stage.UPDATE, False), (Stage.GATHER, False)):
        problem = check(replace(skipped, faults=(Kill(rank=0, step=0, stage=stage),)))
        assert (problem is None) == allowed, problem
        assert allowed or "a skipped one" in str(problem)
        assert check(replace(skipped, faults=(Kill(rank=0, step=1, stage=stage),))) is None


def test_drawing_a_fault_leaves_the_choices_before_it_as_they_were() -> None:
    """So that a scenario on exact sums is the same with and without: the fault is chosen last."""

    class Lowest(Choices):
        def _number(self, low: int, high: int) -> int:
            return low

        def group(self, draw: Callable[[Choices], Any]) -> Any:
            return draw(self)

    plain = draw_scenario(Lowest(), 2, FREE, 1, None)

    assert draw_scenario(Lowest(), 2, for_fault(FREE), 1, None) == plain
    assert draw_fault(Lowest(), plain) == Kill(rank=0, step=0, stage=Stage.COLLECT)


def test_ending_signals_are_those_that_end_a_process() -> None:
    """By the kernel's default (man 7 signal): ignored are CHLD, CONT, URG, WINCH; STOP, TSTP, TTIN, TTOU stop."""
    assert set(range(1, 32)) - language.ENDING_SIGNALS == {17, 18, 19, 20, 21, 22, 23, 28}
