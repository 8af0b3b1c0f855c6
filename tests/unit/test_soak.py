"""What a soak takes for a wrong verdict and for growth, and how it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.evaluate import Conclusion, Evaluation, Evaluator, UndecidedError
from harness.faults.expect import HOLDS, expectation
from harness.faults.language import Corrupt, Delay, Fault, Kill, Mute, Skip
from harness.report.result import EXIT_HOLDS, EXIT_INTERRUPTED, EXIT_UNKNOWN, to_json
from harness.scenario import codec
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values, steps
from harness.soak import campaign
from harness.soak.campaign import SoakOptions, SoakResult, run_soak, wrong_verdict
from harness.soak.growth import ALLOWANCE_BYTES, BYTES_PER_SCENARIO, Usage, growth, usage
from harness.soak.show import result_lines
from harness.subjects.source import parse
from harness.verdict import Divergence, Property, Stage

SCENARIO = Scenario(
    world=2,
    seed=5,
    parameters=(Parameter("w", (3, 4)),),
    values=Values(Domain.EXACT, max_k=255, exponent=-3),
    optimizer=AdamW(),
    operations=(Build(4), Part(False, (0, 1), ((), ())), Step()),
)
KILL = Kill(rank=1, step=0, stage=Stage.REDUCE)
SKIP = Skip(rank=0, step=0, stage=Stage.REDUCE, collective=0)
CORRUPT = Corrupt(rank=1, step=0, stage=Stage.GATHER, collective=0)
LATE = Delay(rank=1, step=0, stage=Stage.GATHER, collective=0, milliseconds=5)


def ended(conclusion: Conclusion) -> Evaluation:
    return Evaluation(conclusion, seconds=0.5)


def violated(prop: Property, rank: int | None) -> Evaluation:
    found = Divergence(property=prop, stage=Stage.REDUCE, rank=rank, message="planted")
    return Evaluation(Conclusion.VIOLATED, found, seconds=0.5)


@pytest.mark.parametrize(
    ("fault", "evaluation", "right"),
    [
        (None, ended(Conclusion.HOLDS), True),
        (None, ended(Conclusion.UNSUPPORTED), True),
        (None, violated(Property.PROGRESS, 1), False),
        (LATE, ended(Conclusion.HOLDS), True),
        (LATE, ended(Conclusion.UNHIT), False),
        (LATE, violated(Property.PROGRESS, 1), False),
        (KILL, violated(Property.PROGRESS, 1), True),
        (KILL, violated(Property.PROGRESS, 0), False),
        (KILL, violated(Property.PROGRESS, None), False),
        (KILL, violated(Property.TRAFFIC, 1), False),
        (KILL, ended(Conclusion.HOLDS), False),
        (KILL, ended(Conclusion.UNHIT), False),
        (KILL, ended(Conclusion.UNSUPPORTED), False),
        (SKIP, violated(Property.TRAFFIC, 0), True),
        (SKIP, violated(Property.PROGRESS, 0), True),
        (SKIP, violated(Property.GRADIENT, 0), False),
        (CORRUPT, violated(Property.WEIGHTS, 1), True),
        (CORRUPT, violated(Property.WEIGHTS, 0), False),
        (CORRUPT, violated(Property.GRADIENT, 1), False),
    ],
)
def test_only_the_expected_property_at_the_rank_of_the_fault_is_right(
    fault: Fault | None, evaluation: Evaluation, right: bool
) -> None:
    scenario = SCENARIO if fault is None else replace(SCENARIO, faults=(fault,))

    assert (wrong_verdict(scenario, evaluation) is None) is right


def test_a_wrong_verdict_says_what_was_expected_and_what_was_got() -> None:
    scenario = replace(SCENARIO, faults=(SKIP,))

    assert wrong_verdict(scenario, violated(Property.PROGRESS, 1)) == (
        "expected progress or traffic at rank 0, with skip on rank 0 at collective 0 of reduce of step 0; "
        "got progress at rank 1: planted"
    )


# --- growth -----------------------------------------------------------------------------------------------------------

HELD = Usage(rss=40 * 2**20, descriptors=15, threads=2, processes=6)


@pytest.mark.parametrize("name", ["descriptors", "threads", "processes"])
def test_one_more_of_a_thing_that_can_be_counted_is_growth(name: str) -> None:
    more = HELD._replace(**{name: getattr(HELD, name) + 1})

    assert [key for key, grown in growth(HELD, more, 1900).items() if grown.excessive] == [name]
    assert not [key for key, grown in growth(more, HELD, 1900).items() if grown.excessive]


def test_memory_may_grow_by_less_than_a_leak_of_every_scenario_would_add() -> None:
    limit = HELD.rss + ALLOWANCE_BYTES + 1000 * BYTES_PER_SCENARIO
    for rss, excessive in ((limit, False), (limit + 1, True)):
        assert growth(HELD, HELD._replace(rss=rss), 1000)["rss"].excessive is excessive


def test_what_this_process_holds_is_counted(tmp_path: Path) -> None:
    before = usage()
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        assert usage().descriptors == before.descriptors + 2
    assert usage().descriptors == before.descriptors


# --- a whole soak over a made-up evaluator ----------------------------------------------------------------------------


class Canned:
    """Answers as a right harness would, but for the scenarios of which ``wrong`` says how."""

    def __init__(self, wrong: dict[int, Evaluation | BaseException]) -> None:
        self.wrong = wrong
        self.scenarios: list[Scenario] = []
        self.prepared: list[int] = []

    def prepare(self, world: int) -> None:
        self.prepared.append(world)

    def evaluate(self, scenario: Scenario) -> Evaluation:
        self.scenarios.append(scenario)
        answer = self.wrong.get(len(self.scenarios) - 1)
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        if not scenario.faults or scenario.faults[0] == LATE:
            return ended(Conclusion.HOLDS)
        return violated(Property.PROGRESS, scenario.faults[0].rank)

    def attributed(self, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        return evaluation


class Quiet:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def example(self, *_: Any) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def draw(seed: int, index: int, worlds: tuple[int, ...], *, fault: bool = False) -> Scenario:
    """In place of the generator: the world tells the turn."""
    faults = (Mute(rank=1),) if fault else ()
    return replace(SCENARIO, seed=index, faults=faults)


def soak(
    monkeypatch: pytest.MonkeyPatch, directory: Path, wrong: dict[int, Any], **options: Any
) -> tuple[SoakResult, Canned]:
    canned = Canned(wrong)
    monkeypatch.setattr(campaign, "Evaluator", lambda *_, **__: canned)
    monkeypatch.setattr(campaign.generate, "draw", draw)
    monkeypatch.setattr(campaign, "smallest", lambda *_, **__: None)  # answers here come in the order of scenarios
    asked = SoakOptions(subject=parse("zero2"), report=directory, **{"examples": 12, "every": 3, **options})
    pool: Any = object()
    return run_soak(asked, Quiet(), pool), canned


def test_every_kth_scenario_has_a_fault_and_all_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, canned = soak(monkeypatch, tmp_path, {})

    assert [bool(scenario.faults) for scenario in canned.scenarios] == [False, False, True] * 4
    assert len({scenario.seed for scenario in canned.scenarios}) == 12
    assert (result.verdict, result.exit_code, result.run) == ("holds", EXIT_HOLDS, 12)
    assert {kind: (it.count, it.right, it.wrong) for kind, it in result.kinds.items()} == {
        "no fault": (8, 8, 0),
        "mute": (4, 4, 0),
    }
    assert result.kinds["mute"].median_s == result.kinds["mute"].longest_s == 0.5
    assert result.warm_up == 6
    assert set(result.growth) == {"rss", "descriptors", "threads", "processes"}
    assert canned.prepared == [2, 3] * 2  # the ranks of all worlds run whenever it is counted
    assert result.wrong is None


def test_a_wrong_verdict_makes_the_harness_broken_and_the_first_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {5: ended(Conclusion.HOLDS), 8: violated(Property.PROGRESS, 0)}
    result, canned = soak(monkeypatch, tmp_path, wrong, timeout_s=5.0)

    assert (result.verdict, result.exit_code, result.run) == ("unknown", EXIT_UNKNOWN, 12)
    assert result.reason == "the harness is broken: 2 of 12 verdicts are wrong"
    assert (result.kinds["mute"].right, result.kinds["mute"].wrong) == (2, 2)
    assert result.wrong is not None
    assert result.wrong.scenario == 5
    assert result.wrong.case is not None
    assert codec.load(Path(result.wrong.case)).scenario == canned.scenarios[5]
    assert result.wrong.replay == f"python -m harness replay {result.wrong.case} --timeout 5"
    assert result.backend == "gloo"
    assert result_lines(result)[-1][0].endswith(result.wrong.replay)


def test_the_command_says_where_it_was_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _ = soak(monkeypatch, tmp_path, {5: ended(Conclusion.HOLDS)}, backend="sim")

    assert result.backend == "sim"
    assert result.wrong is not None
    assert result.wrong.replay == f"python -m harness replay {result.wrong.case} --backend sim"


def test_a_scenario_without_a_verdict_ends_the_soak_as_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _ = soak(monkeypatch, tmp_path, {4: UndecidedError("no ranks")})

    assert (result.exit_code, result.run, result.growth) == (EXIT_UNKNOWN, 5, {})
    assert result.reason == (
        "the subject is not right (see `verify`), or the harness is broken: 1 of 5 verdicts are wrong"
    )
    assert result.wrong is not None
    assert "no ranks" in result.wrong.problem


def test_growth_makes_the_harness_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = iter([HELD, HELD._replace(threads=3)])
    monkeypatch.setattr(campaign, "usage", lambda: next(held))
    result, _ = soak(monkeypatch, tmp_path, {})

    assert result.exit_code == EXIT_UNKNOWN
    assert result.reason == "the harness is broken: threads grew from 2 to 3, limit 2"


def test_an_interrupted_soak_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _ = soak(monkeypatch, tmp_path, {4: KeyboardInterrupt()})

    assert (result.exit_code, result.run, result.interrupted) == (EXIT_INTERRUPTED, 4, True)
    assert result_lines(result)[-1][0].startswith("interrupted: zero2 on gloo, world 2,3, 4 scenarios in ")


def test_a_soak_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, canned = soak(monkeypatch, tmp_path, {}, seconds=1e-9)

    assert canned.scenarios == []
    assert (result.exit_code, result.reason) == (EXIT_UNKNOWN, "no scenario was run")


def test_a_scenario_outside_the_subjects_space_is_not_counted_as_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, _ = soak(monkeypatch, tmp_path, {0: ended(Conclusion.UNSUPPORTED)})

    assert (result.verdict, result.run, result.discarded) == ("holds", 11, 1)


def test_the_result_is_plain_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _ = soak(monkeypatch, tmp_path, {5: ended(Conclusion.HOLDS)})

    assert json.loads(to_json(result))["kinds"]["mute"]["wrong"] == 1


def test_the_made_up_evaluator_has_methods_of_the_real_one() -> None:
    assert not [name for name in ("prepare", "evaluate", "attributed") if not callable(getattr(Evaluator, name))]


def test_the_first_wrong_case_is_made_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its fault; what is saved is the smallest scenario of which the verdict was wrong."""

    class NeverFindsKills(Canned):
        def evaluate(self, scenario: Scenario) -> Evaluation:
            self.scenarios.append(scenario)
            fault = scenario.faults[0] if scenario.faults else None
            if fault is None or isinstance(fault, Kill) or expectation(fault, scenario) == HOLDS:
                return ended(Conclusion.HOLDS)
            found = expectation(fault, scenario)
            return violated(Property(min(found.properties)), found.rank)

    canned = NeverFindsKills({})
    monkeypatch.setattr(campaign, "Evaluator", lambda *_, **__: canned)
    pool: Any = object()

    options = SoakOptions(subject=parse("zero2"), report=tmp_path, examples=60, every=2, seed=3)
    result = run_soak(options, Quiet(), pool)

    assert result.wrong is not None
    saved = codec.load(Path(result.wrong.case or "")).scenario
    assert isinstance(saved.faults[0], Kill)
    assert (saved.world, saved.numel, len(list(steps(saved)))) == (2, 1, 1)
    assert len(canned.scenarios[result.wrong.scenario].operations) > len(saved.operations)  # as drawn
