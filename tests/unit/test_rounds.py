"""Rounds of a campaign: the same for the same seed, whatever comes of them; what fails is kept and gone on after."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pytest

from harness.fuzz import rounds
from harness.fuzz.rounds import Kind, Round, Seen, merge, replay_saved, round_of, run_round
from harness.fuzz.swarm import Feature
from harness.scenario import generate
from harness.scenario.generate import turn
from harness.scenario.model import (
    Build,
    Clip,
    Discard,
    Domain,
    Extension,
    Load,
    Part,
    Rate,
    Scenario,
    Skip,
    beyond,
    check,
    steps,
)
from harness.scenario.relations import Relation, RelationReference, related, relations_of
from harness.scenario.situations import RUNTIME, reached
from tests.examining import Judging
from tests.strategies import EXTENSIONS as STRATEGIES
from tests.support import repetitions, required, sampled

WORLDS = (1, 2, 3, 4)
EVERYTHING = Extension(refresh=True, dtypes=True, strides=True)


def never(_scenario: Scenario) -> bool:
    return False


def discards(scenario: Scenario) -> bool:
    return any(plan.discard for plan in steps(scenario))


def run(
    this: Round,
    fails: Callable[[Scenario], bool] = never,
    *,
    seed: int = 1,
    go_on: bool = False,
    database: Path | None = None,
) -> tuple[Judging, bool]:
    examiner = Judging(fails, go_on=go_on)
    whole = run_round(
        this, seed=seed, worlds=WORLDS, bucket=None, examiner=examiner, extension=EVERYTHING, database=database
    )
    return examiner, whole


def first_of(kind: Kind, off: frozenset[Feature] = frozenset(), seed: int = 1, size: int = 50) -> Round:
    index = next(index for index in itertools.count() if round_of(seed, index).kind is kind)
    return Round(index, kind, off, size)


def short(kind: Kind) -> Round:
    """As campaigns have it with FULL_TABLE; else enough of it to have some of everything."""
    return first_of(kind, size=repetitions(20, 50))


def test_rounds_of_all_kinds_come_early_and_half_have_goals() -> None:
    """A campaign of 300 examples, six rounds, has to reach everything and to relate something."""
    kinds = [round_of(3, index).kind for index in range(8)]
    assert Counter(kinds)[Kind.AIMED] == 4
    assert set(kinds[:6]) == set(Kind)


def test_the_first_six_rounds_aim_at_every_situation() -> None:
    shown: set[str] = set()
    for index in range(6):
        examiner, _ = run(round_of(0, index), seed=0)
        shown.update(situation.value for scenario in examiner.examined for situation in reached(scenario))
    wanted = required(WORLDS, None, EVERYTHING) - RUNTIME
    assert {situation.value for situation in wanted} <= shown


@pytest.mark.parametrize("kind", Kind)
def test_a_round_is_the_same_for_the_same_seed_and_another_for_another(kind: Kind) -> None:
    this = short(kind)
    once, again, other = run(this)[0], run(this)[0], run(this, seed=2)[0]
    assert once.examined == again.examined
    assert once.relations == again.relations
    assert not set(once.examined) & set(other.examined) or kind in (Kind.TARGETED, Kind.STATEFUL)
    assert once.examined != other.examined
    assert len(once.examined) > this.size / 2
    assert all(check(scenario) is None for scenario in once.examined)


@pytest.mark.parametrize("kind", Kind)
def test_what_fails_is_made_small_and_the_round_goes_on_as_if_it_had_not(kind: Kind) -> None:
    this = short(kind)
    held, _ = run(this)
    failed, whole = run(this, discards, go_on=True)

    assert whole
    assert failed.examined == held.examined
    assert len(failed.smallest) == sum(map(discards, dict.fromkeys(held.examined)))
    assert failed.smallest
    for scenario in failed.smallest:
        assert (scenario.world, len(scenario.parameters), scenario.numel) == (1, 1, 1)
        assert [type(operation) for operation in scenario.operations] == [Build, Part, Discard]


@pytest.mark.parametrize("kind", Kind)
def test_a_round_ends_where_the_examiner_wants_it_to(kind: Kind) -> None:
    examiner, whole = run(short(kind), discards)
    assert not whole
    assert len(examiner.smallest) == 1
    assert [discards(scenario) for scenario in examiner.examined].index(True) == len(examiner.examined) - 1


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("error", sampled([KeyboardInterrupt("told"), ValueError("told"), SystemExit("told")], every=3))
def test_what_the_examiner_raises_passes_through(kind: Kind, error: BaseException) -> None:
    def fails(scenario: Scenario) -> bool:
        if discards(scenario):
            raise error
        return False

    with pytest.raises(type(error), match="told"):
        run(short(kind), fails)


@pytest.mark.parametrize("kind", Kind)
def test_without_a_feature_no_scenario_has_it_unless_it_is_the_goal(kind: Kind) -> None:
    def has(scenario: Scenario) -> Iterator[Feature]:
        for operation in scenario.operations[1:]:
            match operation:
                case Discard():
                    yield Feature.DISCARDS
                case Skip():
                    yield Feature.SKIPS
                case Clip():
                    yield Feature.CLIPS
                case Rate():
                    yield Feature.RATES
                case Load():
                    yield Feature.LOADS
                case Build():
                    yield Feature.REBUILDS
                case Part(none=none) if any(none):
                    yield Feature.NONES
                case _:
                    pass
        if scenario.values.domain is Domain.GENERAL:
            yield Feature.GENERAL_VALUES
        if scenario.values.special:
            yield Feature.SPECIAL_VALUES
        if scenario.optimizer.amsgrad:
            yield Feature.AMSGRAD
        if scenario.optimizer.maximize:
            yield Feature.MAXIMIZE
        if len({parameter.dtype for parameter in scenario.parameters}) > 1:
            yield Feature.DTYPES
        if any(parameter.strides != "contiguous" for parameter in scenario.parameters):
            yield Feature.STRIDES
        if any(parameter.numel == 0 for parameter in scenario.parameters):
            yield Feature.EMPTIES
        if any(len(plan.parts) > 1 for plan in steps(scenario)):
            yield Feature.SEVERAL_PARTS

    def shares(off: frozenset[Feature]) -> Counter[Feature]:
        examined = run(first_of(kind, off))[0].examined
        return Counter(feature for scenario in examined for feature in set(has(scenario)))

    with_all, without = shares(frozenset()), shares(frozenset(Feature))
    # The values of related scenarios are exact in any case.
    exact = {Feature.GENERAL_VALUES, Feature.SPECIAL_VALUES} if kind is Kind.RELATED else set()
    assert set(with_all) >= {Feature.DISCARDS, Feature.NONES, Feature.SEVERAL_PARTS, Feature.CLIPS}
    if kind in (Kind.TARGETED, Kind.STATEFUL):
        assert not without
    else:
        assert without.total() < with_all.total() / 2
    assert not exact & set(with_all)


def test_the_features_of_a_round_change_and_some_rounds_have_all() -> None:
    left_out = [round_of(7, index).off for index in range(64)]
    assert 8 <= left_out.count(frozenset()) <= 28
    assert all(0 < sum(feature in off for off in left_out) < 64 for feature in Feature)
    assert [round_of(7, index).off for index in range(64)] == left_out


def test_a_related_round_gives_every_relation_its_turn_and_only_where_it_applies() -> None:
    examiner, _ = run(first_of(Kind.RELATED))
    assert {relation.name for relation in examiner.relations} == {*relations_of("zero_master")} - {Relation.TIER}
    assert len(examiner.relations) > 40
    assert all(scenario.values.domain is not Domain.GENERAL for scenario in examiner.examined)
    with_relation = [scenario for scenario in examiner.examined if scenario not in examiner.by_themselves]
    for scenario, relation in zip(with_relation, examiner.relations, strict=True):
        assert related(scenario, relation.name, relation.pick, relation.worlds) is not None


@pytest.mark.parametrize("worlds", [WORLDS, (2, 3), (1, 2)])
def test_related_rounds_hold_each_goal_against_every_relation(
    monkeypatch: pytest.MonkeyPatch, worlds: tuple[int, ...]
) -> None:
    """Goals and relations both take turns: in time all of them meet. Here all relations apply to all scenarios."""

    class Noting(Judging):
        def relate(self, scenario: Scenario, relation: RelationReference) -> Seen:
            self.relations.append(relation)
            return Seen(violated=False)

    one = generate.draw(1, 0, (2,))
    monkeypatch.setattr(generate, "draw", lambda *_, **__: one)
    monkeypatch.setattr(rounds, "related", lambda *_: one)
    examiner = Noting(never)
    this = Round(2, Kind.RELATED, frozenset(), size=10_000)
    assert run_round(this, seed=1, worlds=worlds, bucket=None, examiner=examiner, extension=EVERYTHING)
    relations = [reference.name for reference in examiner.relations]
    goals = [turn(index, worlds, extension=EVERYTHING).goal for index in range(this.size)]
    each = {*relations_of("zero_master")} - {Relation.TIER}
    assert all(set(relations[at : at + len(each)]) == each for at in range(0, this.size, len(each)))
    assert set(zip(goals, relations, strict=True)) == set(itertools.product(set(goals), each))


def test_a_targeted_round_varies_what_reached_rare_situations() -> None:
    """In the second half of the round, once there is something to vary; and not where it is told of none."""

    class Blind(Judging):
        def examine(self, scenario: Scenario) -> Seen:
            return super().examine(scenario)._replace(reached=frozenset())

    def gains(examiners: list[Judging]) -> list[float]:
        found = []
        for seed, examiner in enumerate(examiners):
            this = first_of(Kind.TARGETED, seed=seed)
            run_round(this, seed=seed, worlds=WORLDS, bucket=None, examiner=examiner)
            counts = [len(reached(scenario)) for scenario in examiner.examined]
            half = len(counts) // 2
            found.append(fmean(counts[half:]) - fmean(counts[:half]))
        return found

    told, blind = gains([Judging(never) for _ in range(3)]), gains([Blind(never) for _ in range(3)])
    assert min(told) > 0
    assert fmean(told) > fmean(blind) + 1


# --- what failed is kept


def kept(database: Path) -> Judging:
    examiner = Judging(never)
    assert replay_saved(database, examiner)
    return examiner


@pytest.mark.parametrize("kind", Kind)
def test_the_smallest_case_is_kept_and_run_again(kind: Kind, tmp_path: Path) -> None:
    examiner, _ = run(short(kind), discards, database=tmp_path)
    again = kept(tmp_path)
    assert again.examined == examiner.smallest
    assert again.relations == examiner.relations[-1:] or kind is not Kind.RELATED


def test_a_case_is_kept_before_it_is_made_smaller(tmp_path: Path) -> None:
    """A process may be killed while it does."""

    def killed(_tried: Scenario) -> bool:
        raise KeyboardInterrupt

    class Killed(Judging):
        def explain(self, scenario: Scenario, smaller: Callable[[Callable[[Scenario], bool]], object]) -> bool:
            smaller(killed)
            return True

    examiner = Killed(discards)
    with pytest.raises(KeyboardInterrupt):
        run_round(first_of(Kind.AIMED), seed=1, worlds=WORLDS, bucket=None, examiner=examiner, database=tmp_path)
    assert kept(tmp_path).examined == [examiner.examined[-1]]


def test_what_fails_again_is_explained_and_ends_the_replay_if_so_wanted(tmp_path: Path) -> None:
    run(first_of(Kind.AIMED), discards, database=tmp_path)
    examiner = Judging(discards)
    assert not replay_saved(tmp_path, examiner)
    assert examiner.smallest == examiner.examined


def test_an_entry_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    run(first_of(Kind.AIMED), discards, database=tmp_path)
    (entry,) = [path for path in tmp_path.glob("*/*") if b"operations" in path.read_bytes()]
    (entry.parent / ("0" * 16)).write_bytes(b"{")
    assert len(kept(tmp_path).examined) == 1


def test_nothing_is_kept_where_there_is_no_database(tmp_path: Path) -> None:
    assert kept(tmp_path / "none").examined == []


def test_databases_of_two_machines_are_merged(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    one, _ = run(first_of(Kind.AIMED), discards, database=here)
    two, _ = run(first_of(Kind.AIMED, seed=2), lambda s: s.world > 2, seed=2, database=there)
    assert merge(there, here) > 0
    assert {*kept(here).examined} == {*one.smallest, *two.smallest}
    assert merge(there, here) == 0
    with pytest.raises(NotADirectoryError, match="missing"):
        merge(tmp_path / "missing", here)


def test_rounds_of_a_muon_subject_have_goals_relations_and_rare_situations_but_no_state_machine() -> None:
    rounds = [round_of(1, index, "muon") for index in range(8)]
    assert {this.kind for this in rounds} == {Kind.AIMED, Kind.RELATED, Kind.TARGETED}
    for this in rounds[:3]:
        examiner = Judging(never)
        assert run_round(dataclasses.replace(this, size=8), seed=1, worlds=WORLDS, bucket=None, examiner=examiner)
        assert len(examiner.examined) >= 8
        assert {scenario.system for scenario in examiner.examined} == {"muon"}
    assert {relation.name for relation in examiner.relations} <= {*relations_of("muon")}
    assert len(examiner.relations) > 4


@pytest.mark.parametrize("offered", ["class", "dmuon hybrid"])
def test_rounds_of_a_strategy_are_within_its_offer_and_have_no_state_machine(offered: str) -> None:
    rounds = [round_of(1, index, "strategy") for index in range(8)]
    assert Counter(each.kind for each in rounds) == {Kind.AIMED: 4, Kind.RELATED: 2, Kind.TARGETED: 2}
    examiner = Judging(never)
    for this in (dataclasses.replace(each, size=10) for each in rounds):
        assert run_round(this, seed=1, worlds=WORLDS, bucket=None, examiner=examiner, extension=STRATEGIES[offered])
    assert {scenario.system for scenario in examiner.examined} == {"strategy"}
    assert all(beyond(scenario, STRATEGIES[offered]) == () for scenario in examiner.examined)
    assert {relation.name for relation in examiner.relations} <= {*relations_of("strategy")}
    assert len(examiner.relations) > 10
