"""A simulated world does as real ranks on gloo do: the same programs and trainings, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.launch.pool import RankPool
from harness.sim.choices import Schedule, SumOrder
from harness.sim.world import SimWorld
from tests.ranks import sim_handler, sim_programs, sim_trainings
from tests.support import sampled

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch about itself; on real ranks nobody sees them

WORLD = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Warm ranks for all tests of this file."""
    with RankPool("tests.ranks.sim_handler:serve", preload=["tests.ranks.sim_trainings"]) as ranks:
        yield ranks


def on_gloo(pool: RankPool, world: int, task: dict[str, Any]) -> list[list[Any]]:
    """What every rank replied; fails with the first failed rank's traceback."""
    outcome = pool.run(world, json.dumps(task).encode(), timeout_s=200.0)
    if not outcome.replied:
        first = outcome.ranks[outcome.first_failed or 0]
        pytest.fail(f"rank {first.rank} {first.end.value}: {first.error}\n{first.output}{first.stacks or ''}")
    return [json.loads(report.reply or b"null") for report in outcome.ranks]


def simulated(
    world: int, task: dict[str, Any], seed: int, schedule: Schedule, order: SumOrder = SumOrder.RING
) -> list[list[Any]]:
    ended = SimWorld(world, seed, order, schedule).run(lambda rank: sim_handler.perform(task, rank, world))
    return json.loads(json.dumps(ended.values()))


def differences(gloo: list[list[Any]], sim: list[list[Any]]) -> list[str]:
    return [
        f"rank {rank}, {one[0]}: on gloo {one[1:]}, simulated {other[1:]}"
        for rank, (mine, its) in enumerate(zip(gloo, sim, strict=True))
        for one, other in zip(mine, its, strict=True)
        if one[:3] != other[:3]
    ]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("world", sampled([2, 3, 4], every=2))
def test_random_programs(pool: RankPool, world: int) -> None:
    seeds, num_steps = [world * 100 + number for number in range(4)], 30
    task = {"do": "programs", "seeds": seeds, "num_steps": num_steps}
    kinds = {step.kind for seed in seeds for step in sim_programs.draw(seed, world, num_steps).steps}
    assert len(kinds) >= len(sim_programs.KINDS) - 1

    gloo = on_gloo(pool, world, task)

    assert min(map(len, gloo)) > 4 * num_steps / 2
    for seed, schedule in ((1, Schedule.RANDOM), (2, Schedule.RANDOM), (3, Schedule.LOCKSTEP)):
        assert differences(gloo, simulated(world, task, seed, schedule)) == []
    # The programs have sums that show their order (of two summands there is but one).
    by_rank = differences(gloo, simulated(world, task, 1, Schedule.RANDOM, SumOrder.RANK))
    assert bool(by_rank) == (world > 2)
    assert all("reduce" in text for text in by_rank)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("training", sampled(sim_trainings.TRAININGS, every=5))
def test_training(pool: RankPool, training: str) -> None:
    task = {"do": "train", "training": training}

    gloo = on_gloo(pool, WORLD, task)

    assert min(map(len, gloo)) > sim_trainings.STEPS
    sim = simulated(WORLD, task, 1, Schedule.RANDOM)
    assert differences(gloo, sim) == []
    # Ranks had different batches, and the weights came together.
    losses = sim_trainings.PARTS * (sim_trainings.STEPS - 1)
    assert len({json.dumps(of_rank[:losses]) for of_rank in sim}) >= WORLD / 2
