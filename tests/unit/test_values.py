"""The values are those of a published generator, exact, traceable and quick to rebuild."""

from __future__ import annotations

import math
import struct
import threading
from fractions import Fraction

import numpy as np
import pytest

from harness.scenario.model import Domain, Parameter, Source, Values
from harness.scenario.values import gradient, gradient_of, initial_weight, initial_weight_of

MASK = 2**64 - 1


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as Salmon et al. define it: ten rounds, the key raised by Weyl constants between them."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(c2 * 0xCA5A826395121157, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


def draws(counter: tuple[int, int, int], key: tuple[int, int], numel: int) -> list[int]:
    """The first 16-bit draws of a stream as the module's documentation defines them."""
    found: list[int] = []
    block = 1
    while len(found) < numel:
        for word in philox4x64((block, *counter), key):
            found += [(word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]
        block += 1
    return found[:numel]


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
        ),
        (
            (MASK, MASK, MASK, MASK),
            (MASK, MASK),
            [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
        ),
    ],
)
def test_the_hand_written_generator_gives_the_authors_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: list[int]
) -> None:
    """Known answers of Random123 (kat_vectors, "philox4x64 10")."""
    assert philox4x64(counter, key) == output


@pytest.mark.parametrize("identity", [(7, 5, 3, 2), (2**63 - 1, 2**31, 2**31, 2**31), (0, 0, 0, 0)])
@pytest.mark.parametrize("numel", [1, 4, 5, 41])
def test_gradients_are_those_of_the_published_generator(identity: tuple[int, int, int, int], numel: int) -> None:
    seed, contributor, step, parameter = identity
    values = Values(Domain.GENERAL, max_k=200, exponent=-130, spread=9)
    integers = [((r * 401) >> 16) - 200 for r in draws((contributor, step, parameter), (seed, 0), numel)]
    offsets = [(r * 10) >> 16 for r in draws((contributor, step, parameter), (seed, 1), numel)]
    expected = [k * Fraction(2) ** (s - 130) for k, s in zip(integers, offsets, strict=True)]
    found = gradient(seed, contributor, step, parameter, numel, values)
    assert found.dtype == np.float32
    assert [Fraction(float(x)) for x in found] == expected
    narrow = gradient(seed, contributor, step, parameter, numel, Values(Domain.EXACT, max_k=200, exponent=-133))
    assert [Fraction(float(x)) for x in narrow] == [k * Fraction(2) ** -133 for k in integers]


@pytest.mark.parametrize(("dtype", "limit", "shift"), [("bf16", 255, 7), ("fp16", 2047, 10), ("fp32", 16383, 13)])
def test_initial_weights_are_those_of_the_published_generator(dtype: str, limit: int, shift: int) -> None:
    integers = [((r * (2 * limit + 1)) >> 16) - limit for r in draws((0, 0, 6), (11, 2), 1000)]
    found = initial_weight(11, 6, 1000, dtype)  # type: ignore[arg-type]
    assert found.dtype == np.float32
    assert found.tolist() == [k * 2.0**-shift for k in integers]


@pytest.mark.parametrize("spread", [0, 3])
def test_a_long_parameter_continues_a_short_one(spread: int) -> None:
    """Chunks follow one another without gap or repeat, whatever the length."""
    values = Values(Domain.GENERAL, 255, -3, spread)
    whole = gradient(1, 2, 3, 4, 200_003, values)
    for numel in (0, 1, 32767, 32768, 32769, 65536, 100_001):
        assert gradient(1, 2, 3, 4, numel, values).tobytes() == whole[:numel].tobytes()
    late = [((r * 511) >> 16) - 255 for r in draws((2, 3, 4), (1, 0), 65600)[-64:]]
    exact = gradient(1, 2, 3, 4, 65600, Values(Domain.EXACT, 255, 0))
    assert exact[-64:].tolist() == late


def test_every_identity_has_values_of_its_own() -> None:
    """Seed, contributor, step and parameter are never mixed up: exchanging any two gives other values."""
    values = Values(Domain.EXACT, 255, 0)
    streams = {
        gradient(seed, contributor, step, parameter, 16, values).tobytes()
        for seed in range(3)
        for contributor in range(3)
        for step in range(3)
        for parameter in range(3)
    }
    weights = {initial_weight(seed, parameter, 16, "bf16").tobytes() for seed in range(3) for parameter in range(3)}
    assert len(streams | weights) == 3**4 + 3**2


@pytest.mark.parametrize("max_k", [1, 2, 127, 255])
def test_all_integers_up_to_the_limit_occur_and_no_zero_is_negative(max_k: int) -> None:
    found = gradient(1, 0, 0, 0, 50_000, Values(Domain.EXACT, max_k, 0))
    assert sorted(set(found.tolist())) == [float(k) for k in range(-max_k, max_k + 1)]
    assert not np.signbit(found[found == 0]).any()
    assert abs(found.mean()) < max_k / 50


@pytest.mark.parametrize("values", [Values(Domain.EXACT, 255, 100), Values(Domain.GENERAL, 255, -133, 60)])
def test_gradients_are_exact_in_bf16(values: Values) -> None:
    """bf16 is the upper half of fp32, so the lower half is zero."""
    found = gradient(1, 0, 0, 0, 10_000, values)
    assert np.isfinite(found).all()
    assert not (found.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(("dtype", "bits"), [("bf16", 8), ("fp16", 11), ("fp32", 24)])
def test_initial_weights_are_exact_in_their_dtype_and_never_negative_zero(dtype: str, bits: int) -> None:
    found = initial_weight(3, 1, 100_000, dtype)  # type: ignore[arg-type]
    significand, _ = np.frexp(found.astype(np.float64))
    assert np.all(np.modf(significand * 2.0**bits)[0] == 0)
    assert np.abs(found).max() < 2
    assert (found == 0).any()
    assert not np.signbit(found[found == 0]).any()


def test_wide_weights_do_not_fit_the_narrower_dtypes() -> None:
    """A parameter that is rounded to the dtype of another one must show it."""
    assert (initial_weight(3, 1, 1000, "fp16").view(np.uint32) & 0xFFFF).any()
    wide = initial_weight(3, 1, 1000, "fp32")
    assert (wide.astype(np.float16).astype(np.float32) != wide).any()


def test_a_gradient_that_was_drawn_before_is_the_callers_own() -> None:
    first = gradient(1, 2, 3, 4, 10, Values(Domain.EXACT, 255, 0))
    before = first.copy()
    first += 1

    assert np.array_equal(gradient(1, 2, 3, 4, 10, Values(Domain.EXACT, 255, 0)), before)


def test_threads_do_not_disturb_each_other() -> None:
    values = Values(Domain.EXACT, 255, 0)
    expected = [gradient(1, rank, 0, 0, 200_000, values).tobytes() for rank in range(4)]
    found: list[bytes] = [b""] * 4

    def rebuild(rank: int) -> None:
        found[rank] = gradient(1, rank, 0, 0, 200_000, values).tobytes()

    threads = [threading.Thread(target=rebuild, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_values_beyond_bf16_are_refused() -> None:
    assert np.isfinite(gradient(1, 0, 0, 0, 1000, Values(Domain.GENERAL, 255, 60, 60))).all()
    with pytest.raises(ValueError, match=r"exponent 61 and spread 60 leave bf16 \(at most 120\)"):
        gradient(1, 0, 0, 0, 1, Values(Domain.GENERAL, 255, 61, 60))


# --- cancelling values


@pytest.mark.parametrize("identity", [(7, 5, 3, 2), (2**63 - 1, 2**31, 2**31, 2**31), (0, 0, 0, 0), (3, 4, 1, 0)])
def test_cancelling_values_are_those_of_the_published_generator(identity: tuple[int, int, int, int]) -> None:
    """What is shared and who has which part of it is drawn for contributor 0, in streams 3 and 4."""
    seed, contributor, step, parameter = identity
    values = Values(Domain.GENERAL, max_k=200, exponent=-120, spread=9, cancel=True)
    shared = [((r * 401) >> 16) - 200 for r in draws((0, step, parameter), (seed, 3), 41)]
    roles = [(r * 3) >> 16 for r in draws((0, step, parameter), (seed, 4), 41)]
    own = [((r * 401) >> 16) - 200 for r in draws((contributor, step, parameter), (seed, 0), 41)]
    expected = [
        (k * Fraction(2) ** -111, -k * Fraction(2) ** -111, small * Fraction(2) ** -120)[(role + contributor) % 3]
        for k, role, small in zip(shared, roles, own, strict=True)
    ]
    found = gradient(seed, contributor, step, parameter, 41, values)
    assert found.dtype == np.float32
    assert [Fraction(float(x)) for x in found] == expected


@pytest.mark.parametrize("first", [0, 1, 2, 11, 2**31 - 2])
@pytest.mark.parametrize("exponent", [-133, -10, 60])
def test_of_three_contributors_in_a_row_two_cancel_and_one_is_small(first: int, exponent: int) -> None:
    """In every element, and each of the three takes each part somewhere."""
    values = Values(Domain.GENERAL, 255, exponent, 30, cancel=True)
    rows = [gradient(9, contributor, 2, 1, 3000, values) for contributor in range(first, first + 3)]
    assert all(row.dtype == np.float32 and not np.signbit(row[row == 0]).any() for row in rows)
    small_at = np.zeros((3, 3000), bool)
    for index in range(3):
        one, other = rows[(index + 1) % 3], rows[(index + 2) % 3]
        cancels = one == -other
        # The third is of the small kind; the large ones are multiples of 2**30 times its unit.
        is_small = np.abs(rows[index]) <= 255 * 2.0**exponent
        is_large = np.mod(np.ldexp(one.astype(np.float64), -exponent), 2.0**30) == 0
        small_at[index] = cancels & is_small & is_large
        assert 0.25 < small_at[index].mean() < 0.45
    assert small_at.any(axis=0).all()


def test_what_cancels_differs_between_steps_parameters_seeds_and_elements() -> None:
    values = Values(Domain.GENERAL, 255, 0, 20, cancel=True)
    rows = {
        np.abs(gradient(seed, contributor, step, parameter, 64, values)).tobytes()
        for seed in (1, 2)
        for contributor in range(3)
        for step in (0, 1)
        for parameter in (0, 1)
    }
    assert len(rows) == 24
    assert len(np.unique(np.abs(gradient(1, 0, 0, 0, 64, values)))) > 40


# --- special values

# By their definition, not by the module's table: bf16 has 8 exponent bits and 7 of the significand.
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127
FINITE_SPECIALS = (LARGEST_BF16, -LARGEST_BF16, 2.0**-133, -(2.0**-133), -0.0, 2.0**-126)
NONFINITE_SPECIALS = (math.inf, -math.inf, math.nan)


def pattern(value: float) -> bytes:
    """The bits; every nan is one."""
    return b"nan" if math.isnan(value) else struct.pack("<f", value)


def specials(*, special: int, nonfinite: bool = False, max_k: int = 255, cancel: bool = False) -> Values:
    return Values(Domain.GENERAL, max_k, -7, 5, cancel=cancel, special=special, nonfinite=nonfinite)


@pytest.mark.parametrize("special", [1, 4, 256, 1024])
@pytest.mark.parametrize("nonfinite", [False, True])
def test_every_special_value_appears_and_no_other(special: int, nonfinite: bool) -> None:
    """About as often as each other; not finite only where that is asked for."""
    plain = gradient(1, 2, 0, 3, 400_000, specials(special=0))
    found = gradient(1, 2, 0, 3, 400_000, specials(special=special, nonfinite=nonfinite))
    chosen = found[found.view(np.uint32) != plain.view(np.uint32)]
    wanted = {pattern(value) for value in (*FINITE_SPECIALS, *(NONFINITE_SPECIALS if nonfinite else ()))}
    count = dict.fromkeys(wanted, 0)
    for value in chosen.tolist():
        count[pattern(value)] += 1  # any other value is a KeyError
    fair = chosen.size / len(wanted)
    assert all(abs(seen - fair) < 6 * math.sqrt(fair) + 0.01 * fair for seen in count.values()), count
    assert np.isfinite(found).all() == (not nonfinite)


@pytest.mark.parametrize("special", [1, 16, 256, 1000, 1024])
def test_special_values_are_as_frequent_as_asked_and_change_nothing_else(special: int) -> None:
    plain = gradient(5, 1, 2, 3, 200_000, specials(special=0))
    found = gradient(5, 1, 2, 3, 200_000, specials(special=special))
    changed = (found.view(np.uint32) != plain.view(np.uint32)).mean()
    rate = special / 1024
    assert abs(changed - rate) <= 6 * math.sqrt(rate * (1 - rate) / 200_000)
    assert special < 1024 or changed == 1
    cancelling = gradient(5, 1, 2, 3, 200_000, specials(special=special, cancel=True))
    base = gradient(5, 1, 2, 3, 200_000, specials(special=0, cancel=True))
    places = found.view(np.uint32) != plain.view(np.uint32)
    assert np.array_equal(cancelling[places], found[places])
    assert np.array_equal(cancelling[~places].view(np.uint32), base[~places].view(np.uint32))


@pytest.mark.parametrize("numel", [1, 2, 9, 64])
def test_special_values_come_up_at_every_position(numel: int) -> None:
    """The first and the last element too; each position has each of the values in some scenario."""
    seen: list[set[bytes]] = [set() for _ in range(numel)]
    for seed in range(1500 // numel + 200):
        for contributor in range(3):
            found = gradient(seed, contributor, 0, 0, numel, specials(special=512, nonfinite=True))
            for position, value in enumerate(found.tolist()):
                seen[position].add(pattern(value))
    wanted = {pattern(value) for value in (*FINITE_SPECIALS, *NONFINITE_SPECIALS)}
    assert all(wanted <= values for values in seen)


@pytest.mark.parametrize("special", [4, 700])
def test_the_places_of_special_values_are_those_of_the_published_generator(special: int) -> None:
    """Stream 5; contributors, steps and parameters have places of their own."""
    identity = (3, 2, 1)
    found = gradient(8, *identity, 4000, specials(special=special))
    plain = gradient(8, *identity, 4000, specials(special=0))
    places = [place for place, r in enumerate(draws(identity, (8, 5), 4000)) if (r * 1024) >> 16 < special]
    assert places
    assert np.flatnonzero(found.view(np.uint32) != plain.view(np.uint32)).tolist() == places


@pytest.mark.parametrize(
    "values",
    [
        specials(special=1024, nonfinite=True),
        specials(special=300, nonfinite=True, cancel=True),
        Values(Domain.GENERAL, 255, -133, 60, cancel=True),
        Values(Domain.GENERAL, 255, 100, cancel=True),
        Values(Domain.GENERAL, 255, 40, 60, cancel=True, special=64),
    ],
)
def test_general_values_of_every_form_are_exact_in_bf16(values: Values) -> None:
    found = gradient(1, 0, 0, 0, 10_000, values)
    assert not (found.view(np.uint32) & 0xFFFF).any()
    assert np.isfinite(found).all() == (not values.nonfinite)


def test_a_long_parameter_with_special_and_cancelling_values_continues_a_short_one() -> None:
    values = specials(special=100, nonfinite=True, cancel=True)
    whole = gradient(1, 2, 3, 4, 100_003, values)
    for numel in (0, 1, 5, 32767, 32769, 65537):
        assert gradient(1, 2, 3, 4, numel, values).tobytes() == whole[:numel].tobytes()


def test_values_without_the_newer_fields_are_drawn_as_ever() -> None:
    """Saved cases replay: streams 0 and 1 alone make them, whatever the defaults of the newer fields are."""
    for values in (Values(Domain.EXACT, 17, 3), Values(Domain.NORM_EXACT, 3, -5), Values(Domain.GENERAL, 255, -90, 60)):
        for seed, contributor, step, parameter in ((1, 0, 0, 0), (2**62, 7, 4, 9)):
            counter = (contributor, step, parameter)
            n = 2 * values.max_k + 1
            integers = [((r * n) >> 16) - values.max_k for r in draws(counter, (seed, 0), 30)]
            offsets = [(r * (values.spread + 1)) >> 16 for r in draws(counter, (seed, 1), 30)]
            expected = [math.ldexp(k, values.exponent + s) for k, s in zip(integers, offsets, strict=True)]
            found = gradient(seed, *counter, 30, values)
            assert found.tolist() == expected
            assert not np.signbit(found[found == 0]).any()


# --- slices of streams


@pytest.mark.parametrize(
    "values",
    [
        Values(Domain.EXACT, 255, -3),
        Values(Domain.GENERAL, 255, -3, 18),
        Values(Domain.GENERAL, 255, -3, 20, cancel=True),
        Values(Domain.GENERAL, 255, -3, 8, special=512, nonfinite=True),
    ],
    ids=["exact", "general", "cancelling", "special"],
)
@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 1000])
def test_a_slice_of_a_stream_has_its_elements_wherever_it_is_cut(values: Values, start: int) -> None:
    whole = gradient(7, 2, 1, 4, 5000, values)
    for numel in (0, 1, 3, 16, 33, 3000):
        assert gradient(7, 2, 1, 4, numel, values, start=start).tobytes() == whole[start : start + numel].tobytes()


@pytest.mark.parametrize("start", [0, 1, 16, 37])
def test_a_slice_of_initial_weights_too(start: int) -> None:
    whole = initial_weight(7, 3, 100, "fp16")
    assert initial_weight(7, 3, 50, "fp16", start=start).tobytes() == whole[start : start + 50].tobytes()


def test_a_long_slice_is_that_of_the_stream_across_chunks() -> None:
    whole = gradient(7, 2, 1, 4, 100_000, Values(Domain.EXACT, 255, 0))
    found = gradient(7, 2, 1, 4, 99_990, Values(Domain.EXACT, 255, 0), start=10)
    assert found.tobytes() == whole[10:].tobytes()


def test_a_parameter_is_put_together_from_its_sources() -> None:
    values = Values(Domain.EXACT, 255, 0)
    mixed = Parameter("p", (7,), "fp32", sources=(Source(3, 2, 5), Source(0, 0, 4)))
    pieces = [gradient(1, 2, 3, 3, 3, values, start=2), gradient(1, 2, 3, 0, 4, values)]
    assert gradient_of(1, 2, 3, mixed, 9, values).tolist() == np.concatenate(pieces).tolist()
    weights = [initial_weight(1, 3, 3, "fp32", start=2), initial_weight(1, 0, 4, "fp32")]
    assert initial_weight_of(1, mixed, 9).tolist() == np.concatenate(weights).tolist()
    plain = Parameter("p", (7,))
    assert gradient_of(1, 2, 3, plain, 9, values).tolist() == gradient(1, 2, 3, 9, 7, values).tolist()
    assert initial_weight_of(1, plain, 9).tolist() == initial_weight(1, 9, 7).tolist()
