"""The rounds of a fuzz campaign: which scenarios are tried, and in which order.

Round number r of seed s is the same scenarios always, whatever machine runs it and whatever ran before. What is known
of a scenario decides what comes next only in a ``TARGETED`` round, and there only what that round has seen itself.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, TypeVar

import hypothesis
from hypothesis import Phase, find, target
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase
from hypothesis.errors import NoSuchExample
from hypothesis.stateful import run_state_machine_as_test

from harness.errors import CaseError
from harness.fuzz import swarm
from harness.fuzz.machine import FEW_RULES, RULES, state_machine
from harness.fuzz.swarm import Feature
from harness.scenario import codec, generate
from harness.scenario.aims import Aim, for_fault
from harness.scenario.model import CONTRACT, Extension, Scenario, System
from harness.scenario.relations import Relation, RelationReference, related, relations_of
from harness.scenario.smaller import smallest
from harness.scenario.space import Choices
from harness.scenario.systems import RUNTIME, SITUATIONS, Narrow, Space, aimed, reached

_T = TypeVar("_T")

ROUND_SIZE = 50
"""Scenarios in a round: seconds, so that little is done twice when a campaign was interrupted."""

Fails = Callable[[Scenario], bool]
Smaller = Callable[[Fails], None]
"""Offers smaller and smaller scenarios to a function that says whether one fails, and that keeps the best itself."""


class Kind(enum.Enum):
    """How the scenarios of a round are chosen.

    AIMED: each has a situation as its goal, in turn, and a world, in turn.
    TARGETED: free ones, from which those with rare situations are varied (``hypothesis.target``).
    STATEFUL: sequences of operations that a state machine draws, rule by rule.
    RELATED: aimed ones on exact data, each with a second one that must give the same.
    """

    AIMED = "aimed"
    TARGETED = "targeted"
    STATEFUL = "stateful"
    RELATED = "related"


# Those that a short campaign needs to be a full one come first. The state machine is one of ZeroMaster.
_KINDS: dict[System, tuple[Kind, ...]] = {
    "zero_master": (
        Kind.AIMED,
        Kind.AIMED,
        Kind.RELATED,
        Kind.AIMED,
        Kind.STATEFUL,
        Kind.TARGETED,
        Kind.AIMED,
        Kind.TARGETED,
    ),
    "muon": (
        Kind.AIMED,
        Kind.AIMED,
        Kind.RELATED,
        Kind.AIMED,
        Kind.TARGETED,
        Kind.AIMED,
        Kind.RELATED,
        Kind.TARGETED,
    ),
    "strategy": (
        Kind.AIMED,
        Kind.AIMED,
        Kind.RELATED,
        Kind.AIMED,
        Kind.TARGETED,
        Kind.AIMED,
        Kind.RELATED,
        Kind.TARGETED,
    ),
}


@dataclass(frozen=True)
class Round:
    """One round; ``off``: the features that its scenarios go without, where their goal does not need them."""

    index: int
    kind: Kind
    off: frozenset[Feature]
    size: int = ROUND_SIZE
    system: System = "zero_master"

    @property
    def place(self) -> int:
        """Its number among the rounds of its kind."""
        kinds = _KINDS[self.system]
        lap, place = divmod(self.index, len(kinds))
        return lap * kinds.count(self.kind) + kinds[:place].count(self.kind)


class Seen(NamedTuple):
    """What came of a scenario: the situations reached, by value, and the largest error in terms of its bound."""

    violated: bool
    reached: frozenset[str] = frozenset()
    margin: float = 0.0


class Examiner(Protocol):
    """Runs scenarios. Whatever it raises ends the round and passes through."""

    def examine(self, scenario: Scenario) -> Seen:
        """Evaluate a scenario and count it."""

    def relate(self, scenario: Scenario, relation: RelationReference) -> Seen:
        """Evaluate a scenario together with the one that is related to it, and count them."""

    def explain(self, scenario: Scenario, smaller: Smaller) -> bool:
        """What was examined or related last is a violation: confirm it, make it smaller, save it. Whether to go on."""


def round_of(seed: int, index: int, system: System = "zero_master") -> Round:
    """Round number ``index``, from 0, of the campaign ``seed`` over a system of this kind."""
    kinds = _KINDS[system]
    return Round(index, kinds[index % len(kinds)], swarm.drawn(seed, index), system=system)


def run_round(
    this: Round,
    *,
    seed: int,
    worlds: Sequence[int],
    bucket: int | None,
    examiner: Examiner,
    extension: Extension = CONTRACT,
    database: Path | None = None,
) -> bool:
    """Run one round to its end, or until the examiner does not want to go on.

    Args:
        this: the round, of :func:`round_of`.
        seed: of the campaign.
        worlds: of the campaign, in the order in which they take turns.
        bucket: fixes the requested bucket size (elements).
        examiner: runs the scenarios.
        extension: what beyond the contract's space may be drawn.
        database: a directory in which what failed is kept; never read here.

    Returns:
        Whether the round was run to its end.
    """
    space = Space(this.system, bucket, extension)
    context = _Context(this, _seed_of(seed, this), tuple(worlds), space, examiner, _database(database))
    if this.kind in (Kind.AIMED, Kind.RELATED):
        return _aimed(context)
    return _Driven(context, _targeted if this.kind is Kind.TARGETED else _stateful).run()


def _seed_of(seed: int, this: Round) -> int:
    """Rounds with goals go on where the last one of their kind ended; others begin anew."""
    place = "" if this.kind in (Kind.AIMED, Kind.RELATED) else this.index
    digest = hashlib.blake2b(f"{seed} {this.kind.value} {place}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _database(directory: Path | None) -> ExampleDatabase | None:
    return None if directory is None else DirectoryBasedExampleDatabase(directory)


class _Context(NamedTuple):
    """A round and all that it is run with; ``seed`` is its own."""

    this: Round
    seed: int
    worlds: tuple[int, ...]
    space: Space
    examiner: Examiner
    database: ExampleDatabase | None

    def seen(self, scenario: Scenario, relation: RelationReference | None) -> Seen:
        """Examine a scenario, by itself or with another."""
        return self.examiner.examine(scenario) if relation is None else self.examiner.relate(scenario, relation)

    def explained(self, scenario: Scenario, relation: RelationReference | None = None) -> bool:
        """Have a violation explained, and keep it, then the smallest that still fails. Whether to go on."""
        kept = _Kept(self.database, scenario, relation)

        def smaller(fails: Fails) -> None:
            def noted(candidate: Scenario) -> bool:
                failed = fails(candidate)
                if failed:
                    kept.replace(candidate)
                return failed

            bucket, extension = self.space.bucket, self.space.extension
            smallest(scenario, noted, worlds=self.worlds, keep_bucket=bucket is not None, extension=extension)

        return self.examiner.explain(scenario, smaller)


# --- what failed is kept ----------------------------------------------------------------------------------------------

_KEY = b"zero2-harness cases"


class _Kept:
    """One failing case in a database: whenever the process ends, the smallest so far is there."""

    def __init__(
        self, database: ExampleDatabase | None, scenario: Scenario, relation: RelationReference | None
    ) -> None:
        self._database = database
        self._relation = relation
        self._entry = b""
        self.replace(scenario)

    def replace(self, scenario: Scenario) -> None:
        if self._database is None:
            return
        entry = codec.encode(codec.Case(scenario, relation=self._relation))
        self._database.save(_KEY, entry)
        if self._entry and self._entry != entry:
            self._database.delete(_KEY, self._entry)
        self._entry = entry


def replay_saved(database: Path, examiner: Examiner, takes: Callable[[Scenario], bool] | None = None) -> bool:
    """Run again what is kept in a database: the same scenarios, in an order of their own.

    What still fails is explained as it is; what holds by now is kept all the same.

    Args:
        database: a directory, which may be missing.
        examiner: runs the scenarios.
        takes: whether a scenario, which may come from elsewhere, is one for this subject; None: any is.

    Returns:
        Whether the examiner wants to go on.
    """
    for entry in sorted(DirectoryBasedExampleDatabase(database).fetch(_KEY)):
        try:
            case = codec.decode(entry, f"an entry of {database}")
        except CaseError:
            continue  # of a newer version, or cut short by a full disk
        scenario, relation = case.scenario, case.relation
        if takes is not None and not takes(scenario):
            continue
        seen = examiner.examine(scenario) if relation is None else examiner.relate(scenario, relation)
        if seen.violated and not examiner.explain(scenario, lambda _fails: None):
            return False
    return True


def merge(source: Path, into: Path) -> int:
    """Add all that one database holds to another; returns how many entries are new.

    A database of Hypothesis is a directory for each key with a file for each entry, named after their content.

    Raises:
        OSError: one cannot be read, or the other not be written.
    """
    if not source.is_dir():
        raise NotADirectoryError(f"{source}: expected a database of examples, got no directory")
    new = 0
    for entry in sorted(path for path in source.glob("*/*") if path.is_file()):
        copy = into / entry.parent.name / entry.name
        if copy.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        unfinished = into / f".{entry.name}-{os.getpid()}"
        unfinished.write_bytes(entry.read_bytes())
        unfinished.replace(copy)
        new += 1
    return new


# --- rounds with a goal for each scenario -----------------------------------------------------------------------------


def _aimed(context: _Context) -> bool:
    this, seed, worlds, space = context[:4]

    def narrow(aim: Aim) -> Aim:
        narrow = swarm.narrowed(aim, this.off)
        return for_fault(narrow) if this.kind is Kind.RELATED else narrow

    for index in range(this.place * this.size, (this.place + 1) * this.size):
        scenario = generate.draw(
            seed, index, worlds, bucket=space.bucket, extension=space.extension, narrow=narrow, system=space.system
        )
        relation = _relation(scenario, seed, index, worlds, space.extension) if this.kind is Kind.RELATED else None
        if context.seen(scenario, relation).violated and not context.explained(scenario, relation):
            return False
    return True


def _relation(
    scenario: Scenario, seed: int, index: int, worlds: tuple[int, ...], extension: Extension
) -> RelationReference | None:
    """Relations take turns, passing over those that do not apply; None: none does."""
    # A simulated world against real ranks is none of them: those would have to be started beside.
    all_of_them = [relation for relation in relations_of(scenario.system) if relation is not Relation.TIER]
    lap, place = divmod(index, len(all_of_them))
    # In another order each time: goals take turns too, and each would always meet the same few relations.
    digest = hashlib.blake2b(f"{seed} relations {lap}".encode(), digest_size=16).digest()
    relations = Random(int.from_bytes(digest, "big")).sample(all_of_them, len(all_of_them))
    for relation in (*relations[place:], *relations[:place]):
        if related(scenario, relation, index, worlds, extension) is not None:
            return RelationReference(relation, index, worlds)
    return None


# --- rounds in which Hypothesis draws one scenario after another ------------------------------------------------------

Play = Callable[["_Context", Fails], None]
"""Has Hypothesis draw scenarios; the same ones each time, as long as what comes of them is the same."""

_PHASES = (Phase.generate, Phase.target)


class _Violation(BaseException):
    """Carries a scenario that fails out through Hypothesis."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.scenario = scenario


class _Carried(BaseException):
    """Carries what the examiner raised out through Hypothesis, which might take it for a failure of the example."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class _Driven:
    """A round in which what comes next is up to Hypothesis.

    To go on after a violation it is played again from the start. What was seen is remembered, so that the same
    scenarios come again, and nothing is examined twice.
    """

    def __init__(self, context: _Context, play: Play) -> None:
        self._context = context
        self._play = play
        self._seen: dict[Scenario, Seen] = {}
        self._explained: set[Scenario] = set()

    def run(self) -> bool:
        """Whether it was run to its end."""
        while True:
            try:
                self._play(self._context, self._examine)
            except _Violation as found:
                scenario = found.scenario
            except _Carried as carrier:
                raise carrier.error from carrier.error.__cause__
            else:
                return True
            if not self._context.explained(scenario):
                return False
            self._explained.add(scenario)

    def _examine(self, scenario: Scenario) -> bool:
        if scenario not in self._seen:
            try:
                self._seen[scenario] = self._context.examiner.examine(scenario)
            except BaseException as error:
                raise _Carried(error) from error
        self._aim(scenario)
        if self._seen[scenario].violated and scenario not in self._explained:
            raise _Violation(scenario)
        return False

    def _aim(self, scenario: Scenario) -> None:
        """Tell Hypothesis how much a scenario is worth varying."""
        seen = self._seen.get(scenario)
        if seen is not None and self._context.this.kind is Kind.TARGETED:
            target(_rarity(self._context, seen.reached), label="rarity of what was reached")
            target(seen.margin, label="rounding error in terms of its bound")


def _targeted(context: _Context, condition: Fails) -> None:
    narrow = functools.partial(swarm.narrowed, off=context.this.off)
    make = functools.partial(_free, worlds=context.worlds, space=context.space, narrow=narrow)
    with generate.nothing_stored(), contextlib.suppress(NoSuchExample):
        find(
            generate.strategy(make),
            condition,
            settings=generate.quietly(context.this.size, _PHASES),
            random=Random(context.seed),
        )


def _stateful(context: _Context, condition: Fails) -> None:
    this, seed, worlds, space = context[:4]
    machine = state_machine(condition, worlds=worlds, bucket=space.bucket, extension=space.extension, off=this.off)
    settings = generate.quietly(this.size, _PHASES, FEW_RULES if Feature.MANY_STEPS in this.off else RULES)
    with generate.nothing_stored():
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)


def _free(choices: Choices, *, worlds: Sequence[int], space: Space, narrow: Narrow) -> Scenario:
    """A scenario without a goal."""
    world = choices.of(sorted(set(worlds)))
    return aimed(choices, None, world, choices.number(0, 2**31), space, narrow)


# Of so many scenarios that are drawn freely, how many are in a situation says how rare it is.
_SAMPLE = 100
_RUNTIME_BITS = 2.0
"""Worth of a situation that only ranks can tell, so that none is drawn for it: as one that a quarter is in."""


def _rarity(context: _Context, reached: Collection[str]) -> float:
    """How unlikely it is to reach so many rare situations at once (bits)."""
    worth = _worth(context.worlds, context.space)
    return math.fsum(worth.get(name, 0.0) for name in sorted(reached))


@functools.lru_cache(maxsize=4)
def _worth(worlds: tuple[int, ...], space: Space) -> Mapping[str, float]:
    """By situation: the rarer among free scenarios, the more (bits)."""
    found: Counter[str] = Counter()
    random = Random(0)
    for _ in range(_SAMPLE):
        scenario = _free(_RandomChoices(random), worlds=worlds, space=space, narrow=generate.as_is)
        found.update(reached(scenario))
    worth = {
        situation.value: math.log2((_SAMPLE + 1) / (found[situation.value] + 1))
        for situation in SITUATIONS[space.system]
    }
    return worth | {situation.value: _RUNTIME_BITS for situation in RUNTIME[space.system]}


class _RandomChoices(Choices):
    """Choices made at random, of a scenario that nobody runs."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def _number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def group(self, draw: Callable[[Choices], _T]) -> _T:
        return draw(self)
