"""`bench muon` on real ranks: what is measured is what the systems do, and they end with the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.bench.muon.campaign import MuonBenchOptions, run_muon_bench, start_pool
from harness.launch.pool import RankPool

NUMEL, MUON = 7_872, 2 * 12 * 16**2  # of tiny-gpt


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that stay for all benches here."""
    with start_pool() as ranks:
        yield ranks


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_systems_end_with_the_same_bits_and_their_sizes_are_right(pool: RankPool, world: int) -> None:
    options = MuonBenchOptions(preset="tiny-gpt", worlds=(world,), steps=1, seed=3)
    result = run_muon_bench(options, lambda text: None, pool=pool)

    assert (result.verdict, result.violation, result.reason) == ("holds", None, None)
    costs = result.per_world[world]
    unsharded, ours, original = costs["unsharded"], costs["newton_schulz"], costs["numel"]
    assert all(cost.seconds > 0 and cost.cpu_seconds > 0 for cost in costs.values())

    # Weights in bf16; master, momentum or two moments, and between ranks the averaged gradient, in fp32.
    state = 2 * NUMEL + 4 * NUMEL + 4 * MUON + 8 * (NUMEL - MUON)
    assert unsharded.kept == state + (4 * NUMEL if world > 1 else 0)
    assert (ours.kept < unsharded.kept) == (world > 1)

    # A ring sends each element 2 (W - 1) / W times, whatever else is sent beside it.
    assert unsharded.sent is not None
    assert ours.sent is not None
    assert unsharded.sent >= 2 * (world - 1) / world * 4 * NUMEL
    assert (ours.sent > 0) == (world > 1)

    # Two layers of costs 3, 1, 4, 4: equal on two ranks; on three the four large ones decide.
    assert (ours.balance, ours.idle) == (1.0, 0)
    assert unsharded.idle == 0
    assert original.idle == world - 1
    assert original.balance == unsharded.balance == pytest.approx({1: 1.0, 2: 2.0, 3: 3.0}[world])
