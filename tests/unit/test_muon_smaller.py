"""Failing scenarios of a Muon optimizer are made smaller: validly, to the end, and to what makes them fail alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from harness.scenario.generate import draw
from harness.scenario.model import Domain, Extension, Reload, Scenario, check, muon_of, steps
from harness.scenario.muon import Mark, MuonSettings, Sharding
from harness.scenario.muon_smaller import fitted
from harness.scenario.smaller import smallest

ALL = Extension(dtypes=True)
WORLDS = (1, 2, 3, 4, 6)
DRAWN = [draw(5, index, WORLDS, extension=ALL, system="muon") for index in range(95)]


def first(fails: Callable[[Scenario], bool]) -> Scenario:
    """The largest one that fails, of those that were drawn."""
    return max(filter(fails, DRAWN), key=lambda made: (made.world, len(made.operations), made.numel))


def shrunk(fails: Callable[[Scenario], bool], start: Scenario | None = None) -> Scenario:
    tried: list[Scenario] = []

    def seen(candidate: Scenario) -> bool:
        assert check(candidate) is None
        assert candidate not in tried
        tried.append(candidate)
        return fails(candidate)

    begin = first(fails) if start is None else start
    best = smallest(begin, seen)
    assert fails(best)
    assert {each.name for each in best.parameters} <= {each.name for each in begin.parameters}
    assert len(tried) < 1500
    return best


def marks(fails: Callable[[Mark], bool]) -> Callable[[Scenario], bool]:
    return lambda made: any(map(fails, muon_of(made).marks))


def test_without_any_need_all_is_plain() -> None:
    best = shrunk(lambda made: True)
    muon = muon_of(best)
    assert (best.world, len(best.operations), best.numel, best.bucket, best.seed) == (1, 1, 1, 1, 0)
    assert muon.marks == (Mark(),)
    assert (muon.sharding, muon.settings, muon.colors, muon.clip) == (Sharding(), MuonSettings(), (), None)
    assert (muon.multiple, muon.backward, muon.no_sync, muon.release_color) == (1, "autograd", False, None)


FAILURES: dict[str, tuple[Callable[[Scenario], bool], Callable[[Scenario], object], object]] = {
    "a matrix": (
        marks(lambda mark: mark.muon),
        lambda made: (made.world, [each.shape for each in made.parameters], muon_of(made).marks),
        (1, [(1, 1)], (Mark(muon=True),)),
    ),
    "unequal blocks": (
        marks(lambda mark: mark.split == "qkv" and len({*mark.sizes}) > 1),
        lambda made: (made.parameters[0].shape[-1], sum(muon_of(made).marks[0].sizes) <= 5),
        (1, True),
    ),
    "heads": (
        marks(lambda mark: mark.num_heads > 1),
        lambda made: ([each.shape for each in made.parameters], muon_of(made).marks),
        ([(2, 1)], (Mark(muon=True, split="heads", num_heads=2),)),
    ),
    "a stack": (
        lambda made: any(
            mark.muon and each.numel > each.shape[-1] * each.shape[-2]
            for each, mark in zip(made.parameters, muon_of(made).marks, strict=True)
        ),
        lambda made: [each.shape for each in made.parameters],
        [(2, 1, 1)],
    ),
    "a colour with a rank outside": (
        lambda made: any(sum(map(len, color.groups)) < made.world for color in muon_of(made).colors),
        lambda made: (made.world, muon_of(made).colors[0].groups, len(made.parameters)),
        (2, ((0,),), 1),
    ),
    "two hops over several nodes": (
        lambda made: muon_of(made).sharding.two_hop and 1 < (muon_of(made).sharding.local_world_size or 0) < made.world,
        lambda made: (made.world, muon_of(made).sharding),
        (4, Sharding(two_hop=True, local_world_size=2)),
    ),
    "a short window": (
        lambda made: (
            muon_of(made).sharding.comm_overlap
            and muon_of(made).sharding.accumulate_steps > max((len(plan.parts) for plan in steps(made)), default=9)
        ),
        lambda made: (made.world, muon_of(made).sharding),
        (1, Sharding(comm_overlap=True, accumulate_steps=2)),
    ),
    "a reload": (
        lambda made: any(isinstance(operation, Reload) for operation in made.operations),
        lambda made: (made.world, len(list(steps(made))), made.numel),
        (1, 1, 1),
    ),
    "a clip": (lambda made: muon_of(made).clip is not None, lambda made: made.numel, 1),
    "released weights": (
        lambda made: muon_of(made).release_color is not None,
        lambda made: (made.world, muon_of(made).release_color, muon_of(made).colors),
        (1, -1, ()),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_only_what_makes_it_fail_is_left(name: str) -> None:
    fails, shown, expected = FAILURES[name]
    assert shown(shrunk(fails)) == expected


def test_general_values_become_exact_ones_with_a_multiple_that_fits() -> None:
    start = first(lambda made: made.values.domain is Domain.GENERAL and made.world == 3)
    best = shrunk(lambda made: made.world == 3, start)
    assert best.values.domain is Domain.EXACT
    assert muon_of(best).multiple == 3


def test_every_drawn_one_ends_at_a_valid_one_whatever_fails() -> None:
    """What fails depends on the scenario alone, and on nothing that shrinking aims at."""
    for made in DRAWN[:12]:
        key = hash(made) % 3

        def fails(candidate: Scenario, key: int = key) -> bool:
            return (candidate.numel + len(candidate.operations) + candidate.world) % 3 == key or candidate.world > 1

        if fails(made):
            shrunk(fails, made)


def test_what_is_fitted_already_stays() -> None:
    assert all(fitted(made) == made for made in DRAWN)


def test_cuts_follow_rows_and_colours_follow_ranks() -> None:
    """In every scenario that is tried on the way, whatever is taken."""
    for made in DRAWN[:10]:
        taken = 0

        def fails(candidate: Scenario) -> bool:
            nonlocal taken
            assert check(candidate) is None
            taken += 1
            return taken % 2 == 0

        smallest(made, fails)
        assert taken


def test_a_case_that_must_stay_on_its_ranks_and_buffer_does() -> None:
    made = next(made for made in DRAWN if made.world == 4)
    best = smallest(made, lambda candidate: True, worlds=(4,), keep_bucket=True)
    assert (best.world, best.bucket) == (4, made.bucket)
    assert msgspec.structs.replace(best, world=4) == best
