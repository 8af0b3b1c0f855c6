"""The numbers of a scenario: gradients and initial weights, rebuilt by every rank from a few integers.

The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a
function from a counter of four 64-bit words and a key of two to four 64-bit words:

- key: ``(seed, stream)``, where ``stream`` is 0 for the integers of a gradient, 1 for its exponents, 2 for weights, 3
  for what cancels between contributors and 4 for who has which part of it (contributor 0 stands for all), 5 for special
  values;
- counter: ``(block, contributor, step, parameter)``, with ``block`` = 1, 2, 3, … along the parameter (numpy counts up
  before it draws, so block 0 is not used).

Each (stream, contributor, step, parameter) has key and counter words of its own, so no two streams overlap. An element
takes 16 bits ``r``, the lowest bits of a word first, and turns them into one of n integers by ``(r * n) >> 16``.

So an element depends on its place alone, not on how many others are drawn: a parameter may hold any slices of these
values (:class:`harness.scenario.model.Source`), in which case the word ``parameter`` is the number of the slice's
stream instead of the parameter's index.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.scenario.model import Parameter, Values, sources

Float32Array = npt.NDArray[np.float32]

_INTEGERS, _EXPONENTS, _WEIGHTS, _SHARED, _ROLES, _SPECIALS = range(6)
_BLOCK = 16  # elements that one count of the generator's counter gives
_CHUNK = 2**15  # elements: the temporaries of one chunk stay in a CPU's second-level cache
_REMEMBERED = 2**12  # elements up to which a gradient is kept for a while: copying is a tenth of drawing
_MAX_EXPONENT = 120  # 255 * 2**120 is the largest finite bf16

# Initial weights are k * 2**-shift with |k| <= limit: as many bits as the dtype keeps (bf16 8, fp16 11; of fp32's 24
# the 14 that a draw fills), so that a master made from them shows any rounding to a smaller dtype.
_WEIGHT_GRID = {"bf16": (255, 7), "fp16": (2047, 10), "fp32": (16383, 13)}


_LARGEST = float.fromhex("0x1.fep127")
_FINITE_SPECIALS = (_LARGEST, -_LARGEST, 2.0**-133, -(2.0**-133), -0.0, 2.0**-126)
_ALL_SPECIALS = (*_FINITE_SPECIALS, math.inf, -math.inf, math.nan)
_SPECIAL_UNIT = 1024


class _Generator(threading.local):
    """One generator a thread, set anew for each stream: a tenth of the time that making a new one takes."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)


_generator = _Generator()


def _draw(
    out: npt.NDArray[Any],
    key: tuple[int, int],
    counter: tuple[int, int, int],
    *,
    low: int,
    high: int,
    scale: float = 1.0,
    start: int = 0,
) -> None:
    """Fill ``out`` with integers from ``low`` to ``high`` (both included, at most 2**15 of them) times ``scale``.

    ``start``: the place of the first one among all that this counter gives.
    """
    block, lead = divmod(start, _BLOCK)
    if lead:
        whole = np.empty(lead + out.size, out.dtype)
        _draw(whole, key, counter, low=low, high=high, scale=scale, start=start - lead)
        out[...] = whole[lead:]
        return
    philox = _generator.philox
    # Tuples where the stubs ask for arrays: numpy takes both, and a list made into an array can pass through float64.
    state: Any = {
        "bit_generator": "Philox",
        "state": {"counter": (block, *counter), "key": key},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,  # nothing buffered
        "has_uint32": 0,
        "uinteger": 0,
    }
    philox.state = state
    count = high - low + 1
    for at in range(0, out.size, _CHUNK):
        chunk = out[at : at + _CHUNK]
        words = philox.random_raw((chunk.size + 3) // 4)
        draws = words.astype("<u8", copy=False).view("<u2")[: chunk.size].astype(np.int32)
        draws *= count  # fits: 2**16 * 2**15 is the first int32 too large
        draws >>= 16
        draws += low
        chunk[...] = draws
        if scale != 1.0:
            chunk *= scale


@functools.lru_cache(maxsize=64)
def _powers(exponent: int, spread: int) -> Float32Array:
    """``2**exponent`` to ``2**(exponent + spread)``: fp32 holds all of these, below 2**-126 as subnormal numbers."""
    return np.array([2.0 ** (exponent + s) for s in range(spread + 1)], np.float32)


def gradient(
    seed: int, contributor: int, step: int, parameter: int, numel: int, values: Values, *, start: int = 0
) -> Float32Array:
    """The gradient of one parameter (given by its index) that one contributor has in one step.

    Args:
        seed: of the scenario.
        contributor: whose gradient.
        step: counted from 0.
        parameter: index in the scenario's list; or the number of a stream of values.
        numel: elements of the parameter.
        values: how to draw.
        start: the first element, where only a slice of the stream is asked for.

    Returns:
        fp32 of shape ``[numel]``, each element exactly representable in bf16; -0.0 only where special values are asked
        for.

    Raises:
        ValueError: the values would leave the range of bf16.
    """
    if values.exponent + values.spread > _MAX_EXPONENT:
        raise ValueError(f"exponent {values.exponent} and spread {values.spread} leave bf16 (at most {_MAX_EXPONENT})")
    slice_ = _Slice(seed, contributor, step, parameter, start, numel)
    if numel > _REMEMBERED:
        return _gradient(slice_, values)
    return _remembered(slice_, values).copy()


class _Slice(NamedTuple):
    """Elements ``[start, start + numel)`` of one stream of gradients."""

    seed: int
    contributor: int
    step: int
    parameter: int
    start: int
    numel: int

    @property
    def counter(self) -> tuple[int, int, int]:
        return self.contributor, self.step, self.parameter

    @property
    def common(self) -> tuple[int, int, int]:
        """The counter of what all contributors share."""
        return 0, self.step, self.parameter


def _gradient(slice_: _Slice, values: Values) -> Float32Array:
    seed, start = slice_.seed, slice_.start
    if values.cancel:
        out = _cancelling(slice_, values)
    else:
        out = np.empty(slice_.numel, np.float32)
        scale = 2.0**values.exponent if values.spread == 0 else 1.0
        k = values.max_k
        _draw(out, (seed, _INTEGERS), slice_.counter, low=-k, high=k, scale=scale, start=start)
        if values.spread:
            offsets = np.empty(slice_.numel, np.uint8)
            _draw(offsets, (seed, _EXPONENTS), slice_.counter, low=0, high=values.spread, start=start)
            out *= _powers(values.exponent, values.spread)[offsets]
    if values.special:
        _insert_specials(out, slice_, values)
    return out


# A rank hands over its own gradient and later adds up everybody's, in the general domain in several orders.
_remembered = functools.lru_cache(maxsize=256)(_gradient)


def _cancelling(slice_: _Slice, values: Values) -> Float32Array:
    seed, start, k = slice_.seed, slice_.start, values.max_k
    large = np.empty(slice_.numel, np.float32)
    scale = 2.0 ** (values.exponent + values.spread)
    _draw(large, (seed, _SHARED), slice_.common, low=-k, high=k, scale=scale, start=start)
    small = np.empty(slice_.numel, np.float32)
    _draw(small, (seed, _INTEGERS), slice_.counter, low=-k, high=k, scale=2.0**values.exponent, start=start)
    roles = np.empty(slice_.numel, np.uint8)
    _draw(roles, (seed, _ROLES), slice_.common, low=0, high=2, start=start)
    roles = (roles + slice_.contributor % 3) % 3
    # Adding 0.0 turns the -0.0 of a negated zero into the +0.0 that all other draws have.
    return np.where(roles == 0, large, np.where(roles == 1, 0.0 - large, small)).astype(np.float32, copy=False)


def _insert_specials(out: Float32Array, slice_: _Slice, values: Values) -> None:
    draws = np.empty(out.size, np.int16)
    _draw(draws, (slice_.seed, _SPECIALS), slice_.counter, low=0, high=_SPECIAL_UNIT - 1, start=slice_.start)
    table = np.array(_ALL_SPECIALS if values.nonfinite else _FINITE_SPECIALS, np.float32)
    chosen = np.flatnonzero(draws < values.special)
    # Which one: from the place too, since few of the draws may be left to choose by.
    out[chosen] = table[(draws[chosen] + chosen + slice_.start) % table.size]


def weights_seed(seed: int, version: int) -> int:
    """The seed of one version of a scenario's weights; version 0 has the scenario's own."""
    return (seed + version * 0x9E3779B97F4A7C15) % 2**63  # an odd number: all versions differ


def initial_weight(
    seed: int, parameter: int, numel: int, dtype: Literal["bf16", "fp16", "fp32"] = "bf16", *, start: int = 0
) -> Float32Array:
    """The initial weight of one parameter (given by its index), or from element ``start`` on of one stream.

    Returns:
        fp32 of shape ``[numel]``, between -2 and 2, each element exactly representable in ``dtype``; never -0.0.
    """
    limit, shift = _WEIGHT_GRID[dtype]
    out = np.empty(numel, np.float32)
    _draw(out, (seed, _WEIGHTS), (0, 0, parameter), low=-limit, high=limit, scale=2.0**-shift, start=start)
    return out


def gradient_of(
    seed: int, contributor: int, step: int, parameter: Parameter, index: int, values: Values
) -> Float32Array:
    """As :func:`gradient`, of the parameter at ``index`` of the list, put together from its sources."""
    return _joined(
        gradient(seed, contributor, step, source.stream, source.stop - source.start, values, start=source.start)
        for source in sources(parameter, index)
    )


def initial_weight_of(seed: int, parameter: Parameter, index: int) -> Float32Array:
    """As :func:`initial_weight`, of the parameter at ``index`` of the list, put together from its sources."""
    return _joined(
        initial_weight(seed, source.stream, source.stop - source.start, parameter.dtype, start=source.start)
        for source in sources(parameter, index)
    )


def _joined(slices: Iterable[Float32Array]) -> Float32Array:
    each = list(slices)
    return each[0] if len(each) == 1 else np.concatenate(each)
