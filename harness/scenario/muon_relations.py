"""What must make no difference to a Muon optimizer: the other scenario of each relation.

A mean over W ranks is divided by W. On another number of ranks the same gradients are to be divided by the same number:
there all parameters belong to one colour, of all ranks, whose divisor is W.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from harness.scenario.layouts import permuted, picked, regrouped, shuffled
from harness.scenario.model import MAX_WORLD, Build, Scenario, muon_of, steps
from harness.scenario.muon import Color
from harness.scenario.muon_smaller import fitted

MAX_MORE_PARTS = 2


def overlap(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Collectives that start from hooks, or do not; with the right number of parts announced, or one too many."""
    muon = muon_of(scenario)
    if muon.backward != "autograd":
        return None  # no hook fires
    sharding = replace(muon.sharding, comm_overlap=not muon.sharding.comm_overlap)
    if sharding.comm_overlap:
        most_parts = max((len(plan.parts) for plan in steps(scenario)), default=1)
        sharding = replace(sharding, accumulate_steps=most_parts + pick % 2)
    return replace(scenario, muon=replace(muon, sharding=sharding))


def hop(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """One hop, or two over nodes of any size."""
    muon = muon_of(scenario)
    if muon.sharding.two_hop:
        sharding = replace(muon.sharding, two_hop=False, local_world_size=None)
    else:
        nodes = [size for size in range(1, scenario.world + 1) if scenario.world % size == 0]
        if len(nodes) < 2:
            return None
        # The middle of them first: of nodes of one rank, or one node, one hop is empty.
        middle = [*nodes[1:-1], nodes[0], nodes[-1]]
        sharding = replace(muon.sharding, two_hop=True, local_world_size=middle[pick % len(middle)])
    return replace(scenario, muon=replace(muon, sharding=sharding))


def fusion(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Fused buffers of another size, or none."""
    muon, numel = muon_of(scenario), scenario.numel
    now = (muon.sharding.fused, scenario.bucket)
    sizes = (numel, max(numel // 3, 1), 1, max(numel // 2, 1), 7, numel + 5)
    others = [(not muon.sharding.fused, scenario.bucket), *((True, size) for size in sizes)]
    fused, bucket = others[pick % len(others)]
    if (fused, bucket) == now:
        fused, bucket = others[0]
    return replace(
        scenario,
        operations=(Build(bucket), *scenario.operations[1:]),
        muon=replace(muon, sharding=replace(muon.sharding, fused=fused)),
    )


def owner(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """Owners by the other rule, or with another cap."""
    muon, sharding = muon_of(scenario), muon_of(scenario).sharding
    if pick % 3 == 2 and sharding.owner_rule == "newton_schulz":
        changed = replace(sharding, owner_cap=1.0 if sharding.owner_cap > 1 else 10.0)
    else:
        changed = replace(sharding, owner_rule="numel" if sharding.owner_rule == "newton_schulz" else "newton_schulz")
    return replace(scenario, muon=replace(muon, sharding=changed))


def order(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """The parameters, with their marks, in another order."""
    muon, new = muon_of(scenario), shuffled(len(scenario.parameters), pick)
    if new is None:
        return None
    return replace(permuted(scenario, new), muon=replace(muon, marks=tuple(muon.marks[old] for old in new)))


def parts(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """As few parts as there can be, or more than there were. Not where groups would get each other's gradients."""
    world, everyone = scenario.world, (tuple(range(scenario.world)),)
    if any(color.groups != everyone for color in muon_of(scenario).colors):
        return None

    def num_parts(num_slots: int, before: int) -> int:
        fewest = max(1, -(-num_slots // world))
        counts = [*range(fewest, before), *range(before + 1, before + 1 + MAX_MORE_PARTS)]
        chosen: int = counts[pick % len(counts)]
        return chosen

    return fitted(regrouped(scenario, world, num_parts))


def another_world(scenario: Scenario, pick: int, worlds: Sequence[int]) -> Scenario | None:
    """The same gradients on another number of ranks, divided by the same number. Not where there are colours."""
    before, muon = scenario.world, muon_of(scenario)
    world = picked([world for world in worlds if world != before and 1 <= world <= MAX_WORLD], pick)
    if world is None or muon.colors:
        return None
    moved = replace(
        muon,
        marks=tuple(replace(mark, color=0) for mark in muon.marks),
        colors=(Color((tuple(range(world)),), float(before)),),
        release_color=None if muon.release_color is None else 0,
    )
    laid = regrouped(scenario, world, lambda num_slots, num_parts: max(1, -(-num_slots // world)))
    return fitted(replace(laid, muon=moved))
