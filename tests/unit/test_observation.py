"""What a rank keeps of a scenario for those who look at its first difference."""

from __future__ import annotations

from typing import cast

import torch

from harness.drive.observation import Witness
from harness.oracles.reference import UnshardedTrainer
from harness.scenario.partition import Partition
from harness.verdict import Quantity, Stage


class Reference:
    """The master of one element, by hand."""

    value = 0.0

    def flat_master(self, most: int) -> bytes:
        return torch.tensor([self.value]).numpy().tobytes()

    def flat_moments(self, most: int) -> None:
        return None


def masters(*values: float) -> list[bytes]:
    return [torch.tensor([value]).numpy().tobytes() for value in values]


def test_a_whole_master_is_held_against_those_of_the_step_before_and_of_the_start() -> None:
    reference = Reference()
    witness = Witness(Partition.from_request(1, 1, 1), cast(UnshardedTrainer, reference))
    witness.start()
    for reference.value in (1.0, 2.0, 3.0):
        witness.stepped()

    found = witness.whole(Quantity.FULL_MASTER, [torch.zeros(1)], 2, Stage.GATHER)

    assert found is not None
    start, before = masters(0.0, 2.0)
    assert found.before == (("the previous step", before), ("before the first step", start))


def test_a_whole_master_without_a_step_is_held_against_nothing_earlier() -> None:
    witness = Witness(Partition.from_request(1, 1, 1), cast(UnshardedTrainer, Reference()))
    witness.start()

    found = witness.whole(Quantity.FULL_MASTER, [torch.ones(1)], None, Stage.GATHER)

    assert found is not None
    assert all(held == found.expected for _, held in found.before)


def test_a_rebuilt_master_is_held_against_that_of_the_instance_before() -> None:
    reference = Reference()
    old = Witness(Partition.from_request(1, 1, 1), cast(UnshardedTrainer, reference))
    old.start()
    reference.value = 1.5
    old.stepped()
    reference.value = 1.0  # made from the weights

    new = Witness(Partition.from_request(1, 1, 1), cast(UnshardedTrainer, reference), old.master)
    found = new.shard(Quantity.MASTER, torch.zeros(1), 1, Stage.BUILD)

    assert found is not None
    assert found.before == (("the previous step", *masters(1.5)),)
