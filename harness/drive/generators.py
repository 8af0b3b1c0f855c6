"""The global random generators where several ranks share a process: each rank has its own, and they take turns.

Turns change at every collective, so it must cost little when nobody draws. Reading the whole state of Python's or
numpy's generator takes longer than all else; whether anything was drawn shows in the memory of the generator, which is
only looked at, never written.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937, BitGenerator, RandomState

from harness.drive.states import seed_generators

# Bound now: a class may replace them.
_PYTHON: Any = random._inst  # the instance whose methods are the functions of `random`
_get_python, _set_python = random.getstate, random.setstate
_get_bits = np.random.get_bit_generator  # type: ignore[attr-defined] # numpy's stubs lack them
_set_bits = np.random.set_bit_generator  # type: ignore[attr-defined]
_get_numpy, _set_numpy = np.random.get_state, np.random.set_state
_MT19937_BYTES = 624 * 4 + 4  # key and position

_Look = Callable[[], bytes | None]


@dataclass
class _State:
    """Of all generators, as one rank has them.

    Attributes:
        python: As ``random.getstate()`` gives it.
        bits: Numpy's bit generator: it is changed for another as a whole, and keeps its own state.
        look_numpy: Gives the memory of ``bits``, or None.
        gauss: The second of a pair of normal numbers, which numpy has in store; None when there is none.
        torch: Of the default generator; no tensor, since those of the class are counted.
    """

    python: tuple[Any, ...]
    bits: BitGenerator
    look_numpy: _Look
    gauss: float | None
    torch: bytes


class Generators:
    """Of all ranks of a world in one process. One rank, or none, has its turn; it draws from its own generators.

    Not of a rank alone, because there is but one in the process: accelerators' generators, and those that code which
    was imported earlier has made for itself.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._states: dict[int | None, _State] = {}
        self._look_python: _Look = _python_memory(_PYTHON) if _python_tells() else _nothing
        self._numpy_tells = _numpy_tells()
        self._keep_all()

    def seed(self, scenario_seed: int, rank: int) -> None:
        """Have this rank's turn, with generators as :func:`harness.drive.states.seed_generators` leaves them."""
        self._keep()
        self._rank = rank
        _set_bits(MT19937(0))  # a class may have put a generator of another kind in its place
        seed_generators(scenario_seed, rank)
        self._keep_all()

    def use(self, rank: int | None) -> None:
        """Have this rank's turn from now on; None: the process's own generators, as they were when this was made.

        Raises:
            LookupError: the rank was never seeded.
        """
        if rank == self._rank:
            return
        state = self._states.get(rank)
        if state is None:
            raise LookupError(f"the generators of rank {rank} were never seeded")
        self._keep()
        self._rank = rank
        _set_python(state.python)
        _set_bits(state.bits)
        if state.gauss is not None:
            _set_numpy({**_get_numpy(legacy=False), "has_gauss": 1, "gauss": state.gauss})
        torch.default_generator.set_state(torch.frombuffer(bytearray(state.torch), dtype=torch.uint8))
        self._note(state)

    def _keep(self) -> None:
        """Keep the present states for the rank whose turn it is, of what was drawn from."""
        state = self._states[self._rank]
        state.torch = _torch_state()
        seen = self._seen_python
        if seen is None or self._look_python() != seen or _PYTHON.gauss_next is not state.python[2]:
            state.python = _get_python()
        seen = self._seen_numpy
        if seen is None or _get_bits() is not state.bits or state.look_numpy() != seen or state.gauss is not None:
            state.bits, state.gauss = _get_bits(), _cached_gauss()
            state.look_numpy = self._numpy_look(state.bits)

    def _keep_all(self) -> None:
        bits = _get_bits()
        state = _State(_get_python(), bits, self._numpy_look(bits), _cached_gauss(), _torch_state())
        self._states[self._rank] = state
        self._note(state)

    def _numpy_look(self, bits: BitGenerator) -> _Look:
        return _numpy_memory(bits) if self._numpy_tells and isinstance(bits, MT19937) else _nothing

    def _note(self, state: _State) -> None:
        """What the generators look like while nobody draws."""
        self._seen_python = self._look_python()
        self._seen_numpy = state.look_numpy()


def _torch_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _cached_gauss() -> float | None:
    state = _get_numpy(legacy=False)
    return float(state["gauss"]) if state["has_gauss"] else None


class _Memory:
    """The memory of a generator of Python's or numpy's; to be compared, nothing else."""

    def __init__(self, owner: object, address: int, num_bytes: int) -> None:
        self._owner = owner  # lives as long as this does
        self._view = (ctypes.c_char * num_bytes).from_address(address)

    def __call__(self) -> bytes:
        return self._view.raw


def _nothing() -> None:
    """Of a generator that cannot be looked at: whoever compares takes it for changed."""


def _python_memory(generator: random.Random) -> _Memory:
    """Behind the header, which counts references."""
    header, size = object.__basicsize__, _random.Random.__basicsize__
    return _Memory(generator, id(generator) + header, size - header)


def _numpy_memory(bits: BitGenerator) -> _Memory:
    return _Memory(bits, bits.ctypes.state_address, _MT19937_BYTES)


def _python_tells() -> bool:
    """Whether this Python keeps the state of a generator where :func:`_python_memory` looks."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(0)
    return _shows(_python_memory(generator), generator.random, lambda: generator.seed(1))


def _numpy_tells() -> bool:
    """Whether this numpy keeps it where :func:`_numpy_memory` looks."""
    bits = MT19937(0)
    generator = RandomState(bits)
    return _shows(_numpy_memory(bits), generator.random_sample, lambda: generator.seed(1))


def _shows(memory: _Memory, *changes: Callable[[], object]) -> bool:
    """Whether each change shows, and nothing else does."""
    for change in changes:
        before = memory()
        if memory() != before:
            return False
        change()
        if memory() == before:
            return False
    return True
