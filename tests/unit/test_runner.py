"""Campaigns and replays over canned ranks: what they conclude, when they stop, what they leave behind.

Only the ranks are canned: drawing, judging, shrinking and saving are the real ones.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from harness import explain, runner, tally
from harness.drive.tasks import CheckSubject, SubjectCheck, decode_task, encode
from harness.errors import UsageError
from harness.explain import REPLAYS
from harness.launch.outcome import Outcome, PoolError, RankEnd, RankReport, Watch
from harness.launch.pool import RankPool
from harness.report.result import EXIT_HOLDS, EXIT_INTERRUPTED, EXIT_UNKNOWN, EXIT_VIOLATED, Result
from harness.runner import REPEAT_EVERY, CampaignOptions, bucket_for, replay_case, run_campaign
from harness.scenario import codec, generate, presets
from harness.scenario.model import (
    CONTRACT,
    AdamW,
    Build,
    Domain,
    Extension,
    Parameter,
    Part,
    Scenario,
    Step,
    System,
    Values,
    steps,
)
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.relations import Relation
from harness.scenario.situations import RUNTIME, Situation, reached
from harness.subjects.source import SubjectSource
from harness.verdict import (
    Collective,
    Divergence,
    NormObservation,
    Property,
    RankStatus,
    RankVerdict,
    Stage,
    WeightsObservation,
)
from tests.support import required

SUBJECT = SubjectSource("zero.py:Zero", "/somewhere/zero.py:Zero", {"factor": 2})
WORLDS = (1, 2, 3, 4)
EVERYTHING = tuple(situation.value for situation in Situation)

# What ranks check themselves; the rest comes from comparing them, from running twice, and from having a verdict.
BY_RANKS = ("weights", "master", "moments", "gradient", "clip", "spill", "intake", "storage", "ownership", "memory")

Answer = Callable[[Scenario, int, int], RankReport]  # of a scenario, a rank, and how many scenarios ran before


def replied(said: RankVerdict) -> RankReport:
    end = RankEnd.REPLIED if said.status is RankStatus.DONE else RankEnd.BROKEN
    return RankReport(said.rank, end, msgspec.msgpack.encode(said), (), None, f"printed by {said.rank}", None)


def verdict(scenario: Scenario, rank: int, **changes: Any) -> RankVerdict:
    """One of a scenario in which everything was checked and is fine."""
    fields: dict[str, Any] = {
        "rank": rank,
        "status": RankStatus.DONE,
        "checks": dict.fromkeys(BY_RANKS, 1),
        "oracle": {"exact": 1},
        "situations": tuple(situation.value for situation in RUNTIME),
        "norms": (NormObservation(0, 0, "0x3f800000"),),
        "weights": (WeightsObservation(0, "aa"),),
        "collectives": (Collective("all_reduce", "fp64", 1, tuple(range(scenario.world)), 0, "norm"),),
    }
    return RankVerdict(**{**fields, **changes})


def fine(scenario: Scenario, rank: int, run: int) -> RankReport:
    return replied(verdict(scenario, rank))


def differs(scenario: Scenario, rank: int, prop: Property = Property.MASTER, step: int = 0) -> RankReport:
    found = Divergence(property=prop, stage=Stage.UPDATE, step=step, rank=0, message="planted", parameter="p")
    return replied(verdict(scenario, rank, divergence=found if rank == 0 else None))


def refuses(scenario: Scenario, rank: int, run: int) -> RankReport:
    return replied(RankVerdict(rank=rank, status=RankStatus.UNSUPPORTED, detail="NotImplementedError"))


def silent(rank: int, end: RankEnd) -> RankReport:
    return RankReport(rank, end, None, (), None, "", None)


def wrong_bit(world: int, rank: int | None = None) -> list[RankReport]:
    """What the ranks say of the first canary; ``rank`` is the one that finds a wrong bit, by default the last."""
    found = Divergence(
        property=Property.GRADIENT, stage=Stage.REDUCE, step=0, rank=rank or world - 1, message="planted"
    )
    verdicts = [RankVerdict(rank=each, status=RankStatus.DONE) for each in range(world)]
    verdicts[found.rank or 0] = msgspec.structs.replace(verdicts[found.rank or 0], divergence=found)
    return [replied(said) for said in verdicts]


def exits(world: int) -> list[RankReport]:
    """What becomes of the second one: it tells where it is, as a trail would, and ends."""
    at = Divergence(property=Property.PROGRESS, stage=Stage.GATHER, step=0, rank=world - 1, message="exit code 0")
    last = replied(RankVerdict(rank=world - 1, status=RankStatus.RAISED, divergence=at))
    return [*(replied(RankVerdict(rank=rank, status=RankStatus.DONE)) for rank in range(world - 1)), last]


class CannedPool:
    """Stands for the ranks; ``cost_s`` is added to the clock for each scenario, and ``raises`` thrown before one."""

    backend = "gloo"

    def __init__(self, directory: Path, answer: Answer = fine) -> None:
        self.directory = directory
        self.answer = answer
        self.problem: str | None = None
        self.incidents: list[str] = []
        self.raises: dict[int, BaseException] = {}
        self.scenarios: list[Scenario] = []
        self.worlds_checked: list[int] = []
        self.canaries = {"canary-bit": wrong_bit, "canary-exit": exits}
        self.num_canaries = 0
        self.clock_s = 0.0
        self.cost_s = 0.0
        self.num_open = self.num_closed = 0
        self.choices: set[tuple[str, str]] = set()
        self.trace: Callable[[], str | None] = lambda: None

    def home(self, world: int) -> int:
        return world

    def run(self, world: int, task: bytes, *, timeout_s: float, watch: Watch | None = None) -> Outcome:
        decoded = decode_task(task)
        canary = self.canaries.get(decoded.subject.path)
        if isinstance(decoded, CheckSubject):
            if canary is None:
                self.worlds_checked.append(world)
            reply = encode(SubjectCheck(self.problem if canary is None else None))
            reports = [RankReport(rank, RankEnd.REPLIED, reply, (), None, "", None) for rank in range(world)]
        elif canary is not None:
            self.num_canaries += 1
            reports = canary(world)
        else:
            run = len(self.scenarios)
            if run in self.raises:
                raise self.raises[run]
            self.scenarios.append(decoded.scenario)
            self.choices.add((decoded.order, decoded.schedule))
            self.clock_s += self.cost_s
            reports = [self.answer(decoded.scenario, rank, run) for rank in range(world)]
        failed = [report.rank for report in reports if report.end is not RankEnd.REPLIED]
        return Outcome(world, tuple(reports), 0.5, failed[0] if failed else None, trace=self.trace())

    def __enter__(self) -> CannedPool:
        self.num_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.num_open -= 1
        self.num_closed += 1


class Watcher:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.examples: list[tuple[int, int, int]] = []
        self.shrunk: list[Scenario] = []
        self.notes: list[str] = []
        self.num_started = 0

    def started(self, options: CampaignOptions) -> None:
        self.num_started += 1

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        assert scenario.world == world
        self.examples.append((done, total, world))

    def shrinking(self, tried: int, best: Scenario) -> None:
        self.shrunk.append(best)

    def note(self, text: str) -> None:
        self.notes.append(text)


_drawn_once = functools.cache(generate.draw)


@pytest.fixture(autouse=True)
def _draw_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full campaigns of the same seed are of the same scenarios, and drawing them is most of what they cost here."""
    monkeypatch.setattr("harness.runner.generate.draw", _drawn_once)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CannedPool:
    """Scenarios take no time unless ``cost_s`` says so; an attempt to start real ranks fails the test."""
    ranks = CannedPool(tmp_path)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ranks.clock_s)
    monkeypatch.setattr(tally, "time", clock)
    monkeypatch.setattr(explain, "time", clock)
    # Relations have tests of their own, below.
    monkeypatch.setattr(runner, "RELATE_EVERY", 10**9)
    applicable = tuple(prop for prop in Property if prop is not Property.INVARIANCE)
    monkeypatch.setattr(runner, "APPLICABLE", {"zero_master": applicable})
    monkeypatch.setattr(runner, "generate", SimpleNamespace(draw=draw))

    def start_pool(_backend: str, _lanes: int, _device: str | None) -> RankPool:
        raise AssertionError("no ranks may be started")

    monkeypatch.setattr(runner, "start_pool", start_pool)
    return ranks


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., CampaignOptions]:
    return functools.partial(
        CampaignOptions,
        subject=SUBJECT,
        worlds=(1, 2),
        backend="gloo",
        seed=7,
        examples=5,
        seconds=None,
        bucket=None,
        parameters=None,
        report=tmp_path / "cases",
        timeout_s=None,
    )


Campaign = Callable[..., Result]


def uninterrupted(run: Callable[[], Result]) -> Result:
    """An interruption that gets out would end the whole test run."""
    try:
        return run()
    except KeyboardInterrupt:
        pytest.fail("the interruption was not handled")


@pytest.fixture
def campaign(pool: CannedPool, watcher: Watcher, options: Callable[..., CampaignOptions]) -> Campaign:
    """Run a campaign with some options on the canned ranks."""

    def run(**changes: Any) -> Result:
        return uninterrupted(lambda: run_campaign(options(**changes), watcher, cast(RankPool, pool)))

    return run


@functools.cache
def draw(
    seed: int,
    index: int,
    worlds: tuple[int, ...],
    *,
    bucket: int | None = None,
    extension: Extension = CONTRACT,
    system: System = "zero_master",
) -> Scenario:
    """The real generator, which is asked only once for what several tests need."""
    return generate.draw(seed, index, worlds, bucket=bucket, extension=extension, system=system)


@pytest.fixture
def offered(pool: CannedPool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Scenario], list[bool]]:
    """Three other scenarios that are offered in this order, and what was said of each."""
    candidates, answers = [draw(7, index, (1, 2)) for index in (1, 2, 3)], list[bool]()

    def smallest(_scenario: Scenario, fails: Callable[[Scenario], bool], **_: object) -> None:
        answers.extend(fails(candidate) for candidate in candidates)

    monkeypatch.setattr(runner, "smallest", smallest)
    return candidates, answers


def plain_case(world: int = 2) -> codec.Case:
    scenario = Scenario(
        world=world,
        seed=1,
        parameters=(Parameter("w", (2, 3)),),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(4), Part(False, tuple(range(world)), ((),) * world), Step()),
    )
    return codec.Case(scenario, codec.SubjectReference(SUBJECT.given, SUBJECT.absolute, SUBJECT.args))


# --- a campaign that holds --------------------------------------------------------------------------------------------


def test_scenarios_are_those_of_the_seed_in_order_and_worlds_take_turns(
    campaign: Campaign, pool: CannedPool, watcher: Watcher
) -> None:
    result = campaign(worlds=(1, 3, 2), examples=7)

    assert pool.scenarios == [draw(7, index, (1, 3, 2)) for index in range(7)]
    assert watcher.examples == [(index, 7, (1, 3, 2)[index % 3]) for index in range(7)]
    assert watcher.num_started == 1
    assert sorted(pool.worlds_checked) == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]  # at the start, and whether the ranks still live at the end
    assert (result.verdict, result.exit_code, result.reason, result.failure) == ("holds", EXIT_HOLDS, None, None)
    assert (result.examples.run, result.examples.discarded) == (7, 0)
    assert {world: examples.count for world, examples in result.examples.per_world.items()} == {1: 3, 2: 2, 3: 2}
    assert (result.subject, result.backend, result.worlds, result.seed) == (SUBJECT.given, "gloo", (1, 3, 2), 7)


def test_a_fixed_bucket_size_is_used_for_every_scenario(campaign: Campaign, pool: CannedPool) -> None:
    campaign(bucket=11)

    assert {scenario.bucket for scenario in pool.scenarios} == {11}


def test_checks_rules_and_situations_are_added_up(campaign: Campaign, pool: CannedPool) -> None:
    result = campaign(worlds=(2,), examples=3)

    assert result.oracle == {"exact": 6, "ordered": 0, "bound": 0, "loose": 0}
    assert result.properties["master"] == 6
    assert result.properties["norm"] == result.properties["agreement"] == result.properties["traffic"] == 3
    assert result.properties["progress"] == 6
    assert result.properties["determinism"] == 0
    assert set(result.properties) == {prop.value for prop in Property}
    told = Counter(situation for scenario in pool.scenarios for situation in reached(scenario))
    for situation in Situation:
        assert result.reached[situation.value] == (3 if situation in RUNTIME else told[situation])


def test_ranks_of_the_campaigns_own_are_ended_on_every_path(
    pool: CannedPool, watcher: Watcher, options: Callable[..., CampaignOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[tuple[str, int, str | None]] = []

    def start_pool(backend: str, lanes: int, device: str | None) -> CannedPool:
        backends.append((backend, lanes, device))
        return pool

    monkeypatch.setattr(runner, "start_pool", start_pool)
    monkeypatch.setattr(runner, "simulation_lanes", lambda worlds, scenario_bytes: 3)
    for run, error in ((100, None), (1, KeyboardInterrupt()), (0, PoolError("gone")), (2, MemoryError())):
        pool.scenarios.clear()
        pool.raises = {} if error is None else {run: error}
        with suppress(MemoryError):
            uninterrupted(lambda: run_campaign(options(backend="sim"), watcher))
        assert pool.num_open == 0
    pool.problem = "planted"
    for asked in (options(), options(device="cuda", backend="sim")):
        with pytest.raises(UsageError):
            run_campaign(asked, watcher)

    assert pool.num_open == 0
    assert backends == [("sim", 3, None)] * 4 + [("gloo", 1, None), ("sim", 3, "cuda")]


def test_ranks_that_were_given_are_left_running(campaign: Campaign, pool: CannedPool) -> None:
    campaign()
    campaign()

    assert pool.num_closed == 0


def test_a_subject_that_cannot_be_used_is_told_before_the_first_example(
    campaign: Campaign, pool: CannedPool, watcher: Watcher
) -> None:
    pool.problem = "planted: lacks collect"

    with pytest.raises(UsageError, match="planted: lacks collect"):
        campaign(worlds=(3, 1))
    assert pool.worlds_checked == [3]
    assert watcher.examples == []


# --- nothing passes vacuously -----------------------------------------------------------------------------------------


def test_a_campaign_of_which_nothing_ran_is_unknown(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = refuses

    result = campaign(examples=6)

    assert (result.verdict, result.exit_code) == ("unknown", EXIT_UNKNOWN)
    assert (result.examples.run, result.examples.discarded) == (0, 6)
    assert result.reason == ("no example was run (all 6 drawn lie outside the subject's space): nothing was compared")


def test_what_lies_outside_the_subjects_space_is_counted_apart(campaign: Campaign, pool: CannedPool) -> None:
    """It is neither run nor checked nor reached."""
    pool.answer = lambda scenario, rank, run: (refuses if run % 2 else fine)(scenario, rank, run)

    result = campaign(worlds=(2,), examples=5)

    assert result.verdict == "holds"
    assert (result.examples.run, result.examples.discarded) == (3, 2)
    assert result.properties["master"] == 6
    assert result.reached["clipping-active"] == 3


def test_verdicts_without_any_comparison_are_unknown(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: replied(RankVerdict(rank=rank, status=RankStatus.DONE))

    result = campaign()

    assert (result.verdict, result.reason) == ("unknown", "nothing was compared")
    assert result.examples.run == 5


def test_a_full_campaign_that_reached_and_checked_everything_holds(campaign: Campaign, pool: CannedPool) -> None:
    result = campaign(worlds=WORLDS, examples=300, seed=0)

    assert (result.verdict, result.reason) == ("holds", None)
    assert all(count for name, count in result.properties.items() if name != "invariance")
    assert all(result.reached[situation.value] for situation in required(WORLDS))
    # Every twentieth scenario is run a second time, and has to give the same.
    assert len(pool.scenarios) == 300 + 300 // REPEAT_EVERY
    assert result.properties["determinism"] == 300 // REPEAT_EVERY
    assert result.examples.run == 300


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_full_campaign_begins_with_the_canaries_and_a_short_one_does_not(
    campaign: Campaign, pool: CannedPool
) -> None:
    campaign(worlds=(3,), examples=19)
    assert pool.num_canaries == 0

    campaign(worlds=(3,), examples=20, canaries=False)
    assert pool.num_canaries == 0

    campaign(worlds=(3,), examples=20)
    assert pool.num_canaries == 2


@pytest.mark.parametrize("bird", ["canary-bit", "canary-exit"])
def test_a_canary_that_passes_means_that_the_harness_is_broken(bird: str, campaign: Campaign, pool: CannedPool) -> None:
    pool.canaries[bird] = lambda world: [
        replied(RankVerdict(rank=rank, status=RankStatus.DONE)) for rank in range(world)
    ]

    result = campaign(worlds=(3,), examples=300)

    assert (result.verdict, result.exit_code) == ("unknown", EXIT_UNKNOWN)
    assert (result.reason or "").startswith(f"the harness is broken: {bird}")
    assert pool.scenarios == []


def test_a_canary_found_out_for_something_else_is_as_bad(campaign: Campaign, pool: CannedPool) -> None:
    pool.canaries["canary-bit"] = lambda world: wrong_bit(world, rank=1)

    result = campaign(worlds=(3,), examples=300)

    assert result.verdict == "unknown"
    assert "stage reduce of rank 2, but was found to violate gradient at stage reduce of rank 1" in (
        result.reason or ""
    )


@pytest.mark.parametrize("lacking", [Situation.CLIPPING_ACTIVE, Situation.WIDE_PARTIAL_SUM])
def test_a_full_campaign_that_never_reached_a_required_situation_is_unknown(
    lacking: Situation, campaign: Campaign, pool: CannedPool
) -> None:
    """With one example fewer it is not a full campaign, and only reports it."""
    told = tuple(situation.value for situation in RUNTIME if situation is not lacking)
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, situations=told))

    full, short = campaign(worlds=WORLDS, examples=300, seed=0), campaign(worlds=WORLDS, examples=299, seed=0)

    assert (full.verdict, full.exit_code) == ("unknown", EXIT_UNKNOWN)
    assert full.reason == f"a full campaign never reached: {lacking.value}"
    assert short.verdict == "holds"
    assert short.reached[lacking.value] == 0


def test_situations_that_scenarios_were_never_in_are_all_named(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the generator drew the same scenario over and over."""
    scenario = draw(0, 0, WORLDS)
    monkeypatch.setattr("harness.runner.generate.draw", lambda *_, **__: scenario)

    result = campaign(worlds=WORLDS, examples=300)

    missing = required(WORLDS) - reached(scenario) - RUNTIME
    assert result.verdict == "unknown"
    assert result.reason == "a full campaign never reached: " + ", ".join(
        situation.value for situation in Situation if situation in missing
    )


@pytest.fixture
def short_campaigns_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 20 examples on."""
    monkeypatch.setattr(runner, "FULL_CAMPAIGN", REPEAT_EVERY)


LACKING: dict[str, dict[str, Any]] = {
    **{name: {"checks": dict.fromkeys(set(BY_RANKS) - {name}, 1)} for name in BY_RANKS},
    "norm": {"norms": ()},
    "agreement": {"weights": ()},
    "traffic": {"collectives": ()},
}


@pytest.mark.usefixtures("short_campaigns_are_full")
@pytest.mark.parametrize("name", sorted(LACKING))
def test_a_full_campaign_that_never_checked_a_property_is_unknown(
    name: str, campaign: Campaign, pool: CannedPool
) -> None:
    changes = {"situations": EVERYTHING, **LACKING[name]}
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, **changes))

    full, short = campaign(worlds=(3, 4), examples=20), campaign(worlds=(3, 4), examples=19)

    assert (full.verdict, full.reason) == ("unknown", f"a full campaign never checked: {name}")
    assert short.verdict == "holds"
    assert short.properties[name] == 0


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_checked_once_is_checked(campaign: Campaign, pool: CannedPool) -> None:
    """By one rank, in one example."""

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        changes = {} if (run, rank) == (13, 2) else LACKING["storage"]
        return replied(verdict(scenario, rank, situations=EVERYTHING, **changes))

    pool.answer = answer
    result = campaign(worlds=(3, 4), examples=20)

    assert result.properties["storage"] == 1
    assert result.verdict == "holds"


@pytest.mark.usefixtures("short_campaigns_are_full")
@pytest.mark.parametrize("worlds", [(1, 2), (1, 2, 3), (4,)])
def test_a_campaign_without_worlds_three_and_four_is_never_full(
    worlds: tuple[int, ...], campaign: Campaign, pool: CannedPool
) -> None:
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, situations=(), **LACKING["storage"]))

    assert campaign(examples=40, worlds=worlds).verdict == "holds"


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_situation_that_came_up_only_in_declined_scenarios_is_not_required(
    campaign: Campaign, pool: CannedPool
) -> None:
    """One that came up in no scenario at all is, also of a class that declines some."""
    declined = Situation.DISCARD_HELD

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        return (
            refuses(scenario, rank, run)
            if declined in reached(scenario)
            else replied(verdict(scenario, rank, situations=EVERYTHING))
        )

    pool.answer = answer
    result = campaign(worlds=(3, 4), examples=80)
    assert result.examples.discarded > 0
    assert (result.verdict, result.reason) == ("holds", None)

    pool.scenarios.clear()
    pool.answer = lambda scenario, rank, run: (
        refuses(scenario, rank, run) if run == 3 else replied(verdict(scenario, rank, situations=()))
    )
    result = campaign(worlds=(3, 4), examples=80)
    assert result.examples.discarded == 1
    lacking = ", ".join(situation.value for situation in Situation if situation in RUNTIME)
    assert (result.verdict, result.reason) == ("unknown", f"a full campaign never reached: {lacking}")


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_subject_with_a_space_of_its_own_must_check_every_property(campaign: Campaign, pool: CannedPool) -> None:
    changes = {"situations": EVERYTHING, **LACKING["storage"]}
    pool.answer = lambda scenario, rank, run: (
        refuses(scenario, rank, run) if run == 3 else replied(verdict(scenario, rank, **changes))
    )
    result = campaign(worlds=(3, 4), examples=80)

    assert (result.examples.run, result.examples.discarded) == (79, 1)
    assert (result.verdict, result.reason) == ("unknown", "a full campaign never checked: storage")


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_violation_stays_one_whatever_else_was_not_reached(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: differs(scenario, rank)

    result = campaign(worlds=(3, 4), examples=20, shrink_s=0.0)

    assert (result.verdict, result.exit_code, result.reason) == ("violated", EXIT_VIOLATED, None)


# --- related scenarios


def cut_otherwise(scenario: Scenario) -> bool:
    return any(parameter.sources for parameter in scenario.parameters)


def test_scenarios_are_held_against_related_ones(
    campaign: Campaign, pool: CannedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RELATE_EVERY", 3)

    result = campaign(examples=200)

    assert (result.verdict, result.examples.run) == ("holds", 200)
    assert result.properties["invariance"] > 4
    num_others = len(pool.scenarios) - 200 - result.properties["determinism"]
    assert num_others == result.properties["invariance"]
    assert any(cut_otherwise(scenario) for scenario in pool.scenarios)


def test_a_full_campaign_that_related_no_scenario_is_unknown(
    campaign: Campaign, pool: CannedPool, monkeypatch: pytest.MonkeyPatch, short_campaigns_are_full: None
) -> None:
    monkeypatch.setattr(runner, "APPLICABLE", {"zero_master": tuple(Property)})
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, situations=EVERYTHING))

    result = campaign(worlds=(3, 4), examples=20)

    assert (result.verdict, result.reason) == ("unknown", "a full campaign never checked: invariance")


def test_a_broken_relation_is_saved_with_the_case_and_replayed(
    campaign: Campaign,
    options: Callable[..., CampaignOptions],
    pool: CannedPool,
    watcher: Watcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "RELATE_EVERY", 1)

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        weights = (WeightsObservation(0, "bb" if cut_otherwise(scenario) else "aa"),)
        return replied(verdict(scenario, rank, weights=weights))

    pool.answer = answer
    result = campaign(examples=200)

    failure = result.failure
    assert failure is not None
    assert (failure.property, failure.stage, failure.step, failure.rank) == ("invariance", "gather", 0, None)
    assert (failure.expected, failure.actual) == ("aa", "bb")
    assert result.found_after is not None
    assert result.found_after.examples == result.examples.run
    assert failure.case is not None
    case = codec.load(Path(failure.case))
    assert case.relation is not None
    assert case.relation.name in (Relation.ORDER, Relation.CUT, Relation.JOIN)
    assert not cut_otherwise(case.scenario)
    again = replay_case(case, Path(failure.case), options(), watcher, cast(RankPool, pool))
    assert again.failure is not None
    assert again.failure.property == "invariance"
    pool.answer = fine
    mended = replay_case(case, Path(failure.case), options(), watcher, cast(RankPool, pool))
    assert (mended.verdict, mended.properties["invariance"]) == ("holds", 1)


def test_a_related_scenario_that_is_wrong_by_itself_is_the_case(
    campaign: Campaign, pool: CannedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RELATE_EVERY", 1)
    pool.answer = lambda scenario, rank, run: (
        differs(scenario, rank) if cut_otherwise(scenario) else fine(scenario, rank, run)
    )

    result = campaign(examples=200)

    assert result.failure is not None
    assert result.failure.property == "master"
    case = codec.load(Path(result.failure.case or ""))
    assert case.relation is None
    assert cut_otherwise(case.scenario)


# --- a parameter list -------------------------------------------------------------------------------------------------

LIST = (Parameter("embedding", (5, 4)), Parameter("scale", ()))


def test_a_parameter_list_is_run_so_often_at_each_world(campaign: Campaign, pool: CannedPool, watcher: Watcher) -> None:
    """Three examples are a held, a spilled and a clipped step; the total counts all worlds."""
    result = campaign(parameters=LIST, worlds=(2, 1), examples=3)

    assert watcher.examples == [(index, 6, world) for index, world in enumerate((2, 2, 2, 1, 1, 1))]
    assert {world: examples.count for world, examples in result.examples.per_world.items()} == {1: 3, 2: 3}
    assert result.examples.run == 6
    assert all(scenario.parameters == LIST for scenario in pool.scenarios)
    for scenarios in (pool.scenarios[:3], pool.scenarios[3:]):
        plans = [next(steps(scenario)) for scenario in scenarios]
        assert [len(plan.parts) for plan in plans] == [1, 2, 1]
        assert [plan.clip is not None for plan in plans] == [False, False, True]


@pytest.mark.parametrize(("bucket", "used"), [(None, 2 * 21 // 9), (7, 7)])
def test_a_parameter_list_gets_a_bucket_that_cuts_it_or_the_given_one(
    bucket: int | None, used: int, campaign: Campaign, pool: CannedPool
) -> None:
    campaign(parameters=LIST, examples=1, bucket=bucket)

    assert [scenario.bucket for scenario in pool.scenarios] == [used, used]


def test_a_large_list_gets_the_bucket_people_train_with() -> None:
    assert bucket_for([Parameter("w", (2**28,))]) == 2**25
    assert bucket_for([Parameter("w", (1,))]) == 1


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_parameter_list_is_not_asked_for_situations(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, situations=(), **LACKING["clip"]))

    assert campaign(parameters=LIST, worlds=(3, 4), examples=20).verdict == "holds"


def test_a_failing_list_is_confirmed_and_made_smaller_as_far_as_it_fails(campaign: Campaign, pool: CannedPool) -> None:
    """What is left has the names of the list, and a world and the bucket size that were asked for."""
    name = LIST[0].name

    def wrong(scenario: Scenario) -> bool:
        several = any(len(plan.parts) > 1 for plan in steps(scenario))
        return several and any(each.name == name and each.numel > 2 for each in scenario.parameters)

    pool.answer = fails_where(wrong)
    result = campaign(parameters=LIST, worlds=(3, 2), examples=3, bucket=5)

    assert result.verdict == "violated"
    assert len({*pool.scenarios[1 : 2 + REPLAYS]}) == 1
    assert result.failure is not None
    assert result.failure.case is not None
    saved = codec.load(Path(result.failure.case)).scenario
    assert saved.parameters == (Parameter(name, (3,)),)
    assert (saved.world, saved.bucket) == (2, 5)
    assert {scenario.world for scenario in pool.scenarios} == {2, 3}
    assert {scenario.bucket for scenario in pool.scenarios} == {5}


def memory_of(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr("harness.runner.available_memory", lambda: available)


def test_a_list_in_so_many_buckets_that_it_would_run_for_days_is_refused(
    watcher: Watcher, options: Callable[..., CampaignOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its case could not be read back either."""
    memory_of(monkeypatch, 2**50)
    given = options(parameters=(Parameter("w", (2**22 + 1,)),), worlds=(1,), bucket=1, examples=1)
    with pytest.raises(UsageError, match=r"the parameter list at world 1: operations\[0\]\.bucket: .* larger --bucket"):
        run_campaign(given, watcher)  # would start ranks of its own


def test_what_does_not_fit_in_memory_is_refused_before_any_rank_starts(
    pool: CannedPool, watcher: Watcher, options: Callable[..., CampaignOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the largest world, with both figures; what just fits is run."""
    needed = presets.memory_estimate(LIST, 2, bucket_for(LIST))
    given = options(parameters=LIST, worlds=(1, 2), examples=1)
    memory_of(monkeypatch, needed - 1)
    with pytest.raises(UsageError, match=r"the parameter list \(21 elements\) at world 2 needs about .* GiB"):
        run_campaign(given, watcher)  # would start ranks of its own
    assert pool.worlds_checked == []

    memory_of(monkeypatch, needed)
    assert run_campaign(given, watcher, cast(RankPool, pool)).verdict == "holds"


def test_a_case_that_does_not_fit_is_refused_before_any_rank_starts(
    watcher: Watcher, options: Callable[..., CampaignOptions], pool: CannedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(monkeypatch, 1)

    with pytest.raises(UsageError, match=r"the case \(6 elements\) at world 2 needs about"):
        replay_case(plain_case(), Path("case.json"), options(), watcher)


def test_an_absurd_list_is_refused_without_being_built(
    pool: CannedPool, watcher: Watcher, options: Callable[..., CampaignOptions]
) -> None:
    with pytest.raises(UsageError, match="1,099,511,627,775 elements"):
        run_campaign(options(parameters=(Parameter("w", (2**40 - 1,)),)), watcher)


# --- the time is up ---------------------------------------------------------------------------------------------------


def test_a_campaign_ends_when_its_time_is_up(campaign: Campaign, pool: CannedPool, watcher: Watcher) -> None:
    """What ran until then is judged: everything held, so it holds, for a campaign of three examples."""
    pool.cost_s = 1000.0

    result = campaign(examples=50, seconds=2500.0)

    assert (result.verdict, result.examples.run) == ("holds", 3)
    assert watcher.notes == ["time is up after 3 of 50 examples"]


@pytest.mark.usefixtures("short_campaigns_are_full")
def test_a_campaign_cut_short_is_no_full_one(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: replied(verdict(scenario, rank, situations=()))
    pool.cost_s = 1000.0

    assert campaign(worlds=(3, 4), examples=20, seconds=18_500.0).verdict == "holds"
    pool.clock_s = 0.0
    assert campaign(worlds=(3, 4), examples=20, seconds=30_500.0).verdict == "unknown"


def test_no_time_for_a_single_example_is_unknown(campaign: Campaign, pool: CannedPool, watcher: Watcher) -> None:
    result = campaign(seconds=1e-9)

    assert pool.scenarios == []
    assert (result.verdict, result.reason) == ("unknown", "no example was run: nothing was compared")
    assert watcher.notes == ["time is up after 0 of 5 examples"]


# --- runs of one case that differ -------------------------------------------------------------------------------------


def failure_of(result: Result) -> tuple[str, str]:
    """Property and message of a violation."""
    assert result.verdict == "violated"
    assert result.exit_code == EXIT_VIOLATED
    assert result.failure is not None
    return result.failure.property, result.failure.message or ""


def test_other_bits_in_a_second_run_are_a_violation_though_both_hold(campaign: Campaign, pool: CannedPool) -> None:
    """One of twenty scenarios is run twice; its second run gives another norm on all ranks alike."""

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        bits = "0x3f800001" if scenario in pool.scenarios[:run] else "0x3f800000"
        return replied(verdict(scenario, rank, norms=(NormObservation(0, 0, bits),)))

    pool.answer = answer
    result = campaign(examples=30, worlds=WORLDS)

    prop, message = failure_of(result)
    assert prop == "determinism"
    assert message == "2 runs of one case gave different bits, each within what rounding allows"
    assert result.properties["determinism"] >= 1
    assert result.failure is not None
    again = _first_repeated()
    assert REPEAT_EVERY // 2 <= again < REPEAT_EVERY - 1
    assert codec.load(Path(result.failure.case or "")).scenario == pool.scenarios[again]
    assert pool.scenarios[again + 1] == pool.scenarios[again]


def _first_repeated() -> int:
    """The first in the second half of twenty whose sums round, of three ranks or more."""
    drawn = (draw(7, index, WORLDS) for index in range(REPEAT_EVERY // 2, REPEAT_EVERY))
    shows = [scenario.values.domain is Domain.GENERAL and scenario.world > 2 for scenario in drawn]
    return REPEAT_EVERY // 2 + shows.index(True)


def test_a_case_that_fails_now_and_then_is_a_violation_of_determinism(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: differs(scenario, rank) if run in (2, 3) else fine(scenario, rank, run)

    prop, message = failure_of(campaign())

    assert prop == "determinism"
    assert message == "failed 2 of 3 runs of one case; one of them: master at stage update: planted"
    assert len(pool.scenarios) == 5


def test_a_case_that_fails_differently_is_a_violation_of_determinism(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: differs(scenario, rank, step=run)

    prop, message = failure_of(campaign())

    assert prop == "determinism"
    assert message == "2 runs of one case failed in different ways; one of them: master at stage update: planted"


def test_a_case_that_comes_and_goes_is_saved_and_not_shrunk(
    campaign: Campaign, pool: CannedPool, watcher: Watcher
) -> None:
    """Shrinking asks whether a smaller case fails, which one run cannot tell here."""
    pool.answer = lambda scenario, rank, run: differs(scenario, rank) if run == 2 else fine(scenario, rank, run)

    result = campaign()

    assert len(pool.scenarios) == 4
    assert watcher.shrunk == []
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == pool.scenarios[2]


def test_crashes_of_different_ranks_are_one_steady_failure(campaign: Campaign, pool: CannedPool) -> None:
    """Which rank a broken connection reaches first is chance."""
    pool.answer = lambda scenario, rank, run: silent(rank, RankEnd.KILLED if rank == run % 2 else RankEnd.ABANDONED)

    assert failure_of(campaign(worlds=(2,), shrink_s=0.0))[0] == "progress"


# --- making a failing case small --------------------------------------------------------------------------------------


def spills(scenario: Scenario) -> bool:
    """A bug that a step of two parts shows, in a world of two or more."""
    return scenario.world > 1 and any(len(plan.parts) > 1 for plan in steps(scenario))


def fails_where(wrong: Callable[[Scenario], bool], prop: Property = Property.MASTER) -> Answer:
    return lambda scenario, rank, run: differs(scenario, rank, prop) if wrong(scenario) else fine(scenario, rank, run)


def test_the_saved_case_is_small_and_was_seen_to_fail(campaign: Campaign, pool: CannedPool, watcher: Watcher) -> None:
    pool.answer = fails_where(spills)

    result = campaign(worlds=WORLDS, examples=300, seed=0)

    assert failure_of(result)[0] == "master"
    assert result.failure is not None
    smallest = codec.load(Path(result.failure.case or "")).scenario
    assert spills(smallest)
    assert smallest in pool.scenarios
    assert watcher.shrunk[-1] == smallest
    assert all(spills(scenario) for scenario in watcher.shrunk)
    assert smallest.world == 2
    assert smallest.numel == 1
    assert [len(plan.parts) for plan in steps(smallest)] == [2]


def test_a_violation_is_seen_before_it_is_explained(campaign: Campaign, pool: CannedPool) -> None:
    """Each run takes 1000 s; the third one fails, and is run again and made smaller afterwards."""
    pool.answer = lambda scenario, rank, run: differs(scenario, rank) if run >= 2 else fine(scenario, rank, run)
    pool.cost_s = 1000.0

    found, whole = (result := campaign(examples=9)).found_after, result.seconds

    assert found is not None
    assert found.examples == 3
    assert 3000 <= found.seconds < 4000 < whole
    pool.answer = fine
    assert campaign(examples=3).found_after is None


def test_a_violation_in_a_second_run_counts_with_the_first(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: replied(
        verdict(scenario, rank, weights=(WeightsObservation(0, "bb" if scenario in pool.scenarios[:run] else "aa"),))
    )

    found = campaign(examples=40, worlds=WORLDS).found_after

    assert found is not None
    assert found.examples == _first_repeated() + 1


def test_a_failing_case_is_run_again_before_it_is_shrunk(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = fails_where(lambda scenario: True)

    result = campaign(examples=5, shrink_s=0.0)

    assert set(pool.scenarios[: 1 + REPLAYS]) == {pool.scenarios[0]}
    assert result.properties["determinism"] == REPLAYS
    assert result.examples.run == 1


Offered = tuple[list[Scenario], list[bool]]


def test_every_smaller_case_is_run_before_it_is_believed(
    campaign: Campaign, pool: CannedPool, offered: Offered
) -> None:
    """Also the first: taken on trust, it would become what all others have to be smaller than."""
    candidates, answers = offered
    failing = (draw(7, 0, (1, 2)), candidates[1])
    pool.answer = fails_where(lambda scenario: scenario in failing)

    result = campaign()

    assert pool.scenarios[1 + REPLAYS :] == candidates
    assert answers == [False, True, False]
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == candidates[1]


def test_a_smaller_case_that_fails_otherwise_is_not_taken(
    campaign: Campaign, pool: CannedPool, offered: Offered
) -> None:
    """It would be another bug, and the report would be about that one."""
    first = draw(7, 0, (1, 2))

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        return differs(scenario, rank, Property.MASTER if scenario == first else Property.WEIGHTS)

    pool.answer = answer
    result = campaign()

    assert failure_of(result)[0] == "master"
    assert offered[1][1:] == [False, False]
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == first


def test_shrinking_stops_at_a_smaller_case_that_hangs(campaign: Campaign, pool: CannedPool, offered: Offered) -> None:
    """It is taken, and no further time-out is spent."""
    candidates, _ = offered

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        if run > 1 + REPLAYS and rank == 0:
            return silent(rank, RankEnd.TIMED_OUT)
        return silent(rank, RankEnd.EXITED) if rank == 0 else silent(rank, RankEnd.ABANDONED)

    pool.answer = answer
    result = campaign()

    assert pool.scenarios[1 + REPLAYS :] == candidates[:2]
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == candidates[1]


def test_shrinking_keeps_so_many_ranks_that_the_wrong_one_can_be_told(campaign: Campaign, pool: CannedPool) -> None:
    """Of two logs that differ nobody can tell which is wrong; of three the one that is alone."""

    def answer(scenario: Scenario, rank: int, run: int) -> RankReport:
        kind = "broadcast" if rank == 0 and scenario.world > 1 else "all_reduce"
        called = Collective(kind, "fp64", 1, tuple(range(scenario.world)), 0, "norm")
        return replied(verdict(scenario, rank, collectives=(called,)))

    pool.answer = answer
    named, unnamed = campaign(worlds=(3, 2)), campaign(worlds=(2,))

    assert failure_of(named)[0] == failure_of(unnamed)[0] == "traffic"
    assert {scenario.world for scenario in pool.scenarios} >= {2, 3}
    assert named.failure is not None
    assert unnamed.failure is not None
    assert named.failure.rank == 0
    assert codec.load(Path(named.failure.case or "")).scenario.world == 3
    assert unnamed.failure.rank is None
    assert codec.load(Path(unnamed.failure.case or "")).scenario.world == 2


def several(scenario: Scenario) -> bool:
    """A bug that the first scenario shows and the simplest one does not, so that shrinking has something to do."""
    return len(scenario.parameters) > 1


@pytest.mark.parametrize(
    "limits",
    [{"shrink_s": 3500.0}, {"shrink_s": 1e6, "seconds": 1000.0 * (1 + REPLAYS) + 3500.0}],
    ids=["its own", "the campaign's"],
)
def test_shrinking_ends_when_its_time_is_up(
    limits: dict[str, float], campaign: Campaign, pool: CannedPool, watcher: Watcher
) -> None:
    """Each run takes 1000 s: a fourth try is begun in time, a fifth is not. What was found so far is kept."""
    pool.answer = fails_where(several)
    pool.cost_s = 1000.0

    result = campaign(worlds=WORLDS, **limits)

    assert failure_of(result)[0] == "master"
    assert len(pool.scenarios) == 1 + REPLAYS + 4
    assert watcher.notes == ["shrinking stopped after 4 tries: the case may not be the smallest"]
    assert result.failure is not None
    saved = codec.load(Path(result.failure.case or "")).scenario
    assert saved == [scenario for scenario in pool.scenarios if several(scenario)][-1]


def test_a_case_that_hangs_is_neither_run_again_nor_shrunk(campaign: Campaign, pool: CannedPool) -> None:
    """Each further run would cost a whole time-out."""
    pool.answer = lambda scenario, rank, run: (
        fine(scenario, rank, run) if run < 2 or rank else silent(rank, RankEnd.TIMED_OUT)
    )

    result = campaign()

    assert failure_of(result)[0] == "progress"
    assert len(pool.scenarios) == 3
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == pool.scenarios[2]


# --- what is left behind ----------------------------------------------------------------------------------------------


def test_a_failure_names_the_case_and_the_command_that_replays_it(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = fails_where(lambda scenario: True)

    failure = campaign(shrink_s=0.0).failure

    assert failure is not None
    assert (failure.property, failure.stage, failure.step, failure.rank) == ("master", "update", 0, 0)
    cut_short = "planted (shrinking stopped after 0 tries: the case may not be the smallest)"
    assert (failure.parameter, failure.message, failure.output) == ("p", cut_short, "printed by 0")
    assert failure.cut_short == "shrinking stopped after 0 tries: the case may not be the smallest"
    assert failure.case is not None
    case = codec.load(Path(failure.case))
    assert case.subject == codec.SubjectReference(SUBJECT.given, SUBJECT.absolute, SUBJECT.args)
    assert (case.failure or {})["property"] == "master"
    # It lies elsewhere, so that the case alone would not be allowed to run it.
    assert failure.replay == f"python -m harness replay {failure.case} --subject zero.py:Zero --subject-arg factor=2"
    assert failure.test is not None
    assert failure.test.endswith(
        "check_case(CASE, subject='zero.py:Zero', subject_args={'factor': 2}, backend='gloo')\n"
    )


def test_a_case_whose_subject_lies_here_replays_by_itself(campaign: Campaign, pool: CannedPool) -> None:
    pool.answer = fails_where(lambda scenario: True)

    failure = campaign(shrink_s=0.0, subject=SubjectSource("zero.py:Zero", f"{Path.cwd() / 'zero.py'}:Zero")).failure

    assert failure is not None
    assert failure.replay == f"python -m harness replay {failure.case}"


def test_a_case_that_cannot_be_saved_is_a_violation_all_the_same(
    campaign: Campaign, pool: CannedPool, tmp_path: Path
) -> None:
    pool.answer = fails_where(lambda scenario: True)
    (tmp_path / "taken").write_text("a file where the directory should be")

    result = campaign(report=tmp_path / "taken", shrink_s=0.0)

    assert failure_of(result)[0] == "master"
    assert result.failure is not None
    assert (result.failure.case, result.failure.replay) == (None, None)
    assert "(the case could not be saved: " in (result.failure.message or "")


# --- interruption -----------------------------------------------------------------------------------------------------


def test_an_interrupted_campaign_gives_what_it_has(campaign: Campaign, pool: CannedPool) -> None:
    pool.raises[3] = KeyboardInterrupt()

    result = campaign()

    assert (result.verdict, result.interrupted, result.exit_code) == ("unknown", True, EXIT_INTERRUPTED)
    assert result.examples.run == 3
    assert result.properties["master"] > 0
    assert result.failure is None


def test_an_interruption_before_the_first_example_is_one_too(
    campaign: Campaign, pool: CannedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run", interrupted)

    result = campaign()

    assert (result.verdict, result.exit_code, result.examples.run) == ("unknown", EXIT_INTERRUPTED, 0)


@pytest.mark.parametrize("run", [1, 1 + REPLAYS, 1 + REPLAYS + 12], ids=["confirming", "shrinking", "later"])
def test_an_interruption_after_a_violation_keeps_the_best_case(run: int, campaign: Campaign, pool: CannedPool) -> None:
    """The smallest that was seen to fail by then."""
    pool.answer = fails_where(spills)
    first = next(index for index in range(100) if spills(draw(7, index, WORLDS)))
    assert first < REPEAT_EVERY
    pool.raises[first + run] = KeyboardInterrupt()

    result = campaign(worlds=WORLDS, examples=100)

    assert (result.verdict, result.interrupted, result.exit_code) == ("violated", True, EXIT_INTERRUPTED)
    assert len(pool.scenarios) == first + run
    assert result.failure is not None
    saved = codec.load(Path(result.failure.case or "")).scenario
    assert saved == [scenario for scenario in pool.scenarios if spills(scenario)][-1]


# --- the harness fails ------------------------------------------------------------------------------------------------


def test_ranks_that_cannot_go_on_leave_it_unknown_with_what_was_seen(campaign: Campaign, pool: CannedPool) -> None:
    pool.raises[2] = PoolError("the zygote is gone")

    result = campaign()

    assert (result.verdict, result.exit_code, result.reason) == ("unknown", EXIT_UNKNOWN, "the zygote is gone")
    assert result.examples.run == 2


def test_a_campaign_that_never_begins_speaks_of_its_own_system(
    campaign: Campaign, pool: CannedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> Outcome:
        raise PoolError("the zygote is gone")

    monkeypatch.setattr(pool, "run", gone)

    result = campaign(subject=SubjectSource("muon", "muon"))

    assert (result.verdict, result.reason, result.system) == ("unknown", "the zygote is gone", "muon")
    assert set(result.missing) <= set(result.reached) == {situation.value for situation in MuonSituation}
    assert result.missing


@pytest.mark.parametrize("run", [1, 1 + REPLAYS], ids=["confirming", "shrinking"])
def test_a_failure_of_the_harness_does_not_lose_a_violation(run: int, campaign: Campaign, pool: CannedPool) -> None:
    """That the subject is wrong has been seen; only the case may not be the smallest."""
    pool.answer = fails_where(lambda scenario: True)
    pool.raises[run] = PoolError("the zygote is gone")

    result = campaign()

    assert failure_of(result)[0] == "master"
    assert result.failure is not None
    assert codec.load(Path(result.failure.case or "")).scenario == pool.scenarios[0]


# --- replays ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def replay(pool: CannedPool, watcher: Watcher, options: Callable[..., CampaignOptions]) -> Callable[..., Result]:
    """Replay one case on the canned ranks."""

    def run(case: codec.Case, **changes: Any) -> Result:
        given = options(**changes)
        return uninterrupted(lambda: replay_case(case, Path("case.json"), given, watcher, cast(RankPool, pool)))

    return run


Replay = Callable[..., Result]


def test_a_replayed_case_that_holds_every_time_holds(replay: Replay, pool: CannedPool, watcher: Watcher) -> None:
    result = replay(plain_case())

    assert (result.verdict, result.exit_code, result.failure) == ("holds", EXIT_HOLDS, None)
    assert pool.scenarios == [plain_case().scenario] * (1 + REPLAYS)
    assert result.examples.run == 1
    assert result.properties["determinism"] == REPLAYS
    assert watcher.examples == [(0, 1, 2)]


def test_a_replayed_violation_names_the_file_it_came_from(replay: Replay, pool: CannedPool, tmp_path: Path) -> None:
    """And saves no other."""
    pool.answer = fails_where(lambda scenario: True)

    result = replay(plain_case())

    assert failure_of(result) == ("master", "planted")
    assert result.failure is not None
    command = "python -m harness replay case.json --subject zero.py:Zero --subject-arg factor=2"
    assert (result.failure.case, result.failure.replay) == ("case.json", command)
    assert len(pool.scenarios) == 1 + REPLAYS
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words", "choices"),
    [
        ({}, "", (None, None)),
        ({"backend": "sim"}, " --backend sim", ("ring", "random")),
        ({"backend": "sim", "order": "tree"}, " --backend sim --order tree", ("tree", "random")),
        (
            {"backend": "sim", "order": "random", "schedule": "lockstep"},
            " --backend sim --order random --schedule lockstep",
            ("random", "lockstep"),
        ),
    ],
)
def test_the_command_and_the_result_have_what_a_simulated_world_chose(
    replay: Replay, pool: CannedPool, changes: dict[str, str], words: str, choices: tuple[str | None, str | None]
) -> None:
    pool.answer = fails_where(lambda scenario: True)

    result = replay(plain_case(), **changes)

    assert result.failure is not None
    assert (result.failure.replay or "").endswith(f"factor=2{words}")
    assert (result.order, result.schedule) == choices


def test_the_evaluator_is_told_what_a_simulated_world_chose(pool: CannedPool, campaign: Campaign) -> None:
    campaign(backend="sim", order="rank", schedule="lockstep", examples=2)

    assert pool.choices == {("rank", "lockstep")}


def test_another_interleaving_of_one_seed_is_a_violation_that_says_so(pool: CannedPool, campaign: Campaign) -> None:
    """The bits may be the same."""
    traces = iter(f"trace {number}" for number in range(1000))
    pool.trace = lambda: next(traces)

    result = campaign(backend="sim", examples=REPEAT_EVERY)

    assert result.failure is not None
    assert result.failure.property == "determinism"
    assert (
        result.failure.message
        == "2 runs of one case gave the same bits, but their ranks did not wait in the same places"
    )


def test_a_case_of_many_ranks_may_need_the_memory_of_one_process(
    pool: CannedPool, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "available_memory", lambda: presets.PROCESS_BYTES + 2**20)

    assert replay(plain_case(), backend="sim").verdict == "holds"
    with pytest.raises(UsageError, match="are available"):
        replay(plain_case())


def test_the_command_names_the_subject_when_the_case_names_another(replay: Replay, pool: CannedPool) -> None:
    pool.answer = fails_where(lambda scenario: True)

    failure = replay(codec.Case(plain_case().scenario, None), backend="sim").failure

    assert failure is not None
    assert failure.replay == (
        "python -m harness replay case.json --subject zero.py:Zero --subject-arg factor=2 --backend sim"
    )


@pytest.mark.parametrize(
    ("failing", "text"), [({0}, "failed 1 of 2"), ({3}, "failed 1 of 4"), ({0, 1}, "failed 2 of 3")]
)
def test_a_replayed_case_that_fails_now_and_then_is_a_violation(
    failing: set[int], text: str, replay: Replay, pool: CannedPool
) -> None:
    pool.answer = lambda scenario, rank, run: differs(scenario, rank) if run in failing else fine(scenario, rank, run)

    prop, message = failure_of(replay(plain_case()))

    assert prop == "determinism"
    assert message.startswith(f"{text} runs of one case; one of them: master at stage update")


def test_a_replayed_case_with_other_bits_in_its_last_run_is_a_violation(replay: Replay, pool: CannedPool) -> None:
    pool.answer = lambda scenario, rank, run: replied(
        verdict(scenario, rank, weights=(WeightsObservation(0, "bb" if run == REPLAYS else "aa"),))
    )

    assert failure_of(replay(plain_case()))[0] == "determinism"


def test_a_replayed_case_that_hangs_is_run_once(replay: Replay, pool: CannedPool) -> None:
    """Each further run would cost a whole time-out."""
    pool.answer = lambda scenario, rank, run: silent(rank, RankEnd.TIMED_OUT)

    assert failure_of(replay(plain_case()))[0] == "progress"
    assert len(pool.scenarios) == 1


def test_a_replayed_case_outside_the_subjects_space_is_unknown(replay: Replay, pool: CannedPool) -> None:
    pool.answer = refuses

    result = replay(plain_case())

    assert (result.verdict, result.exit_code, result.examples.discarded) == ("unknown", EXIT_UNKNOWN, 1)
    assert "outside its space" in (result.reason or "")
    assert len(pool.scenarios) == 1


def test_a_replay_that_compared_nothing_is_unknown(replay: Replay, pool: CannedPool) -> None:
    """That all ranks answered is no comparison."""
    pool.answer = lambda scenario, rank, run: replied(RankVerdict(rank=rank, status=RankStatus.DONE))

    result = replay(plain_case())

    assert (result.verdict, result.reason) == ("unknown", "nothing was compared")


def test_a_replay_whose_ranks_fail_is_unknown(replay: Replay, pool: CannedPool) -> None:
    pool.raises[0] = PoolError("the zygote is gone")

    result = replay(plain_case())

    assert (result.verdict, result.reason) == ("unknown", "the zygote is gone")


def test_an_interrupted_replay_keeps_the_violation_it_saw(replay: Replay, pool: CannedPool) -> None:
    pool.answer = fails_where(lambda scenario: True)
    pool.raises[2] = KeyboardInterrupt()

    result = replay(plain_case())

    assert (result.verdict, result.interrupted, result.exit_code) == ("violated", True, EXIT_INTERRUPTED)
    assert result.examples.run == 1
