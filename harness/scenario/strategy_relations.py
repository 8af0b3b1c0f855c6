"""What must make no difference to a strategy: the other scenario of each relation.

What a subject does not offer is another matter: :func:`harness.scenario.relations.related` leaves out what is beyond
it, such as another number of replicas where a configuration fixes it, or unused parameters.

A mean over W ranks is divided by W. On W' ranks the same gradients have the same mean if each integer is multiplied by
W' / W: so there is another world only where that is a whole number, and where the larger integers still fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from harness.scenario.layouts import permuted, picked, regrouped, shuffled, with_parts
from harness.scenario.model import MAX_WORLD, Part, Scenario, steps, strategy_of
from harness.scenario.strategy import ROOT, Accumulation, Place
from harness.scenario.strategy_check import trainable
from harness.scenario.strategy_situations import replicas_of
from harness.scenario.strategy_smaller import fitted, numbered

MOST_BLOCKS = 4
# Those that any subject has, with as many parts as it takes to tell them from the one before.
_ACCUMULATIONS: dict[Accumulation, int] = {"sync": 1, "no_sync": 2, "nested": 3}


def accumulation(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Parts accumulated in another way, of those that any subject has. Not where there is one part, and no flush."""
    strategy = strategy_of(scenario)
    most_parts = max((len(plan.parts) for plan in steps(scenario)), default=0)
    if most_parts < 2 and strategy.accumulation != "flush":
        return None
    able = [each for each, fewest in _ACCUMULATIONS.items() if most_parts >= fewest and each != strategy.accumulation]
    other = picked(able, pick)
    return None if other is None else replace(scenario, strategy=replace(strategy, accumulation=other))


def mesh(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Another number of replicas, where there may be some."""
    strategy = strategy_of(scenario)
    if strategy.sharding != "hybrid":
        return None
    replicas = picked([each for each in replicas_of(scenario.world) if each != strategy.replicas], pick)
    return None if replicas is None else replace(scenario, strategy=replace(strategy, replicas=replicas))


def another_world(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """The same gradients on another number of ranks, of which each uses something in each part."""
    before, strategy = scenario.world, strategy_of(scenario)
    num_parts = [len(plan.parts) for plan in steps(scenario)]

    def fits(world: int) -> bool:
        multiplied = strategy.multiple * world % before == 0
        return multiplied and all(before * count % world == 0 for count in num_parts)

    world = picked([each for each in worlds if each != before and 1 <= each <= MAX_WORLD and fits(each)], pick)
    if world is None:
        return None
    laid = regrouped(scenario, world, lambda num_slots, num_parts: max(1, num_slots // world))
    moved = replace(laid, strategy=replace(strategy, multiple=strategy.multiple * world // before))
    mended = fitted(moved)
    # Not with other values: fewer bits may be left than these need.
    same = strategy_of(mended).multiple == strategy_of(moved).multiple
    return mended if same and mended.values == scenario.values else None


def parts(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """A part in two, on each rank: some of what it used in the first of them, the rest in the second.

    Or, in each other case, the gradients of each step dealt anew to parts and ranks.
    """
    if pick % 2:
        return _dealt(scenario, pick)
    moving = trainable(strategy_of(scenario))
    random = Random(pick)
    changed = False

    def change(each: Sequence[Part]) -> list[Part]:
        nonlocal changed
        able = [at for at, part in enumerate(each) if all(_splits(none, moving) for none in part.none)]
        at = picked(able, pick // 2)
        if at is None:
            return list(each)
        changed = True
        return [*each[:at], *_halves(each[at], moving, random), *each[at + 1 :]]

    operations = with_parts(scenario, change)
    return _fitting(replace(scenario, operations=operations), scenario) if changed else None


def _splits(none: Sequence[int], moving: Sequence[int]) -> bool:
    """Whether a rank uses two parameters or more."""
    return len({*moving} - {*none}) > 1


def _halves(part: Part, moving: Sequence[int], random: Random) -> list[Part]:
    first, second = [], []
    for none in part.none:
        used = sorted({*moving} - {*none})
        random.shuffle(used)
        at = random.randrange(1, len(used))
        first.append(tuple(sorted({*none, *used[at:]})))
        second.append(tuple(sorted({*none, *used[:at]})))
    return [replace(part, more=True, none=tuple(first)), replace(part, none=tuple(second))]


def _dealt(scenario: Scenario, pick: int) -> Scenario | None:
    random = Random(pick)

    def change(each: Sequence[Part]) -> list[Part]:
        slots = [(part.contributors[rank], part.none[rank]) for part in each for rank in range(scenario.world)]
        random.shuffle(slots)
        rows = [slots[at : at + scenario.world] for at in range(0, len(slots), scenario.world)]
        return [
            replace(part, contributors=tuple(slot[0] for slot in row), none=tuple(slot[1] for slot in row))
            for part, row in zip(each, rows, strict=True)
        ]

    return replace(scenario, operations=with_parts(scenario, change))


def _fitting(other: Scenario, scenario: Scenario) -> Scenario | None:
    """The other one, unless its sums have no room for as many parts."""
    return other if fitted(other).values == scenario.values else None


def order(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """The parameters, each where it was, in another order."""
    strategy, new = strategy_of(scenario), shuffled(len(scenario.parameters), pick)
    if new is None:
        return None
    places = tuple(strategy.places[old] for old in new)
    return replace(permuted(scenario, new), strategy=replace(strategy, places=places))


def blocks(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """The parameters in other blocks, or in the root."""
    strategy, random = strategy_of(scenario), Random(pick)
    count = random.randint(1, MOST_BLOCKS)

    def moved(place: Place) -> Place:
        in_root = place.plain or not strategy.bare_root
        return replace(place, block=random.randint(ROOT if in_root else 0, count - 1))

    places = numbered([moved(place) for place in strategy.places])
    return replace(scenario, strategy=replace(strategy, places=places))
