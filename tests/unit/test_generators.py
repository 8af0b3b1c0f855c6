"""Every rank of a world in one process draws as if the process were its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from harness.drive import generators
from harness.drive.generators import Generators
from harness.drive.states import seed_generators

# ruff: noqa: NPY002 (the generators that a class may use)

DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "random.getrandbits": lambda: random.getrandbits(3),
    "random.seed": lambda: random.seed(5),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy shuffle": lambda: np.random.permutation(5).tolist(),
    "numpy seed": lambda: np.random.seed(5),
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
    "torch seed": lambda: torch.manual_seed(5).initial_seed(),
    "numpy of another kind": lambda: np.random.set_bit_generator(np.random.PCG64(5)),
    "nothing": lambda: None,
}


@pytest.fixture
def ranks() -> Iterator[Generators]:
    made = Generators()
    yield made
    made.use(None)


@pytest.fixture(params=["looked at", "not looked at"], name="either")
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Generators]:
    """Also where generators cannot be looked at, as this Python or numpy keeps them in another way."""
    if request.param == "not looked at":
        monkeypatch.setattr(generators, "_python_tells", lambda: False)
        monkeypatch.setattr(generators, "_numpy_tells", lambda: False)
    made = Generators()
    yield made
    made.use(None)


def alone(draws: list[list[Callable[[], object]]], seed: int) -> list[list[object]]:
    """What each rank draws in a process of its own."""
    found = []
    for rank, own in enumerate(draws):
        np.random.set_bit_generator(np.random.MT19937(0))
        seed_generators(seed, rank)
        found.append([draw() for draw in own])
    return found


def test_ranks_in_turns_draw_what_they_draw_alone(either: Generators) -> None:
    choices = random.Random(3)
    names = list(DRAWS)
    for seed in range(40):
        world = choices.randint(2, 4)
        # A few kinds each: a rank that draws from all of them would hide that one is not kept.
        kinds = [choices.sample(names, 2) for _ in range(world)]
        draws = [[DRAWS[choices.choice(kinds[rank])] for _ in range(20)] for rank in range(world)]
        expected = alone(draws, seed)

        for rank in range(world):
            either.seed(seed, rank)
        found: list[list[object]] = [[] for _ in range(world)]
        while unfinished := [rank for rank in range(world) if len(found[rank]) < 20]:
            rank = choices.choice(unfinished)
            either.use(rank)
            for draw in draws[rank][len(found[rank]) :][: choices.randint(0, 3)]:
                found[rank].append(draw())
        assert found == expected, (seed, kinds)


def test_the_processs_own_generators_are_there_afterwards(ranks: Generators) -> None:
    def draw() -> list[object]:
        return [random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]

    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    expected = [draw(), draw()]
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    assert draw() == expected[0]  # leaves the second of a pair in store
    bits = np.random.get_bit_generator()

    for rank in range(3):
        ranks.seed(7, rank)
        draw()
    ranks.use(None)

    assert draw() == expected[1]
    assert np.random.get_bit_generator() is bits


def test_only_what_was_drawn_from_is_read(ranks: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for name in ("_get_python", "_get_numpy"):
        original = getattr(generators, name)
        monkeypatch.setattr(generators, name, lambda *a, _o=original, _n=name, **k: read.append(_n) or _o(*a, **k))
    for rank in range(2):
        ranks.seed(7, rank)
    read.clear()

    for rank in (0, 1, 0, 1):
        ranks.use(rank)
    assert read == []
    random.random()
    ranks.use(0)
    assert read == ["_get_python"]
    np.random.rand()
    ranks.use(1)
    assert read == ["_get_python", "_get_numpy"]


def test_a_rank_must_have_been_seeded(ranks: Generators) -> None:
    with pytest.raises(LookupError, match="rank 3 were never seeded"):
        ranks.use(3)


def test_a_generator_that_shows_nothing_is_noticed() -> None:
    """As it would be if another version kept its state elsewhere."""
    other = random.Random(1)
    memory = generators._python_memory(random.Random(0))

    assert not generators._shows(memory, other.random)
    assert generators._python_tells()
    assert generators._numpy_tells()
