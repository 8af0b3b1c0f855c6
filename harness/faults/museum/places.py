"""Where a bug is, for those that are not everywhere: what the rank and the parameter that are named must be. No torch.

Each of these takes the scenario that failed and the failure as it is told, and says whether the place is right.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from harness.faults.museum.exhibit import Place
from harness.report.result import Failure
from harness.scenario.model import Scenario, steps
from harness.scenario.partition import Partition, round_bucket


def first_rank(scenario: Scenario, failure: Failure) -> bool:
    """Rank 0."""
    return failure.rank == 0


def last_rank(scenario: Scenario, failure: Failure) -> bool:
    """The last rank."""
    return failure.rank == scenario.world - 1


def not_first_rank(scenario: Scenario, failure: Failure) -> bool:
    """Any rank but 0."""
    return failure.rank is not None and 0 < failure.rank < scenario.world


def lacks_gradients(scenario: Scenario, failure: Failure) -> bool:
    """A rank that misses the gradient of some parameter in the step that failed."""
    rank, step = failure.rank, failure.step
    if rank is None or step is None:
        return False
    return any(part.none[rank] for part in list(steps(scenario))[step].parts)


def last_bucket(scenario: Scenario, failure: Failure) -> bool:
    """An element of the last bucket."""
    size = round_bucket(_bucket(scenario, failure), scenario.world)
    return failure.bucket == (scenario.numel - 1) // size


def not_first_bucket(scenario: Scenario, failure: Failure) -> bool:
    """An element of any bucket but the first."""
    return failure.bucket is not None and failure.bucket > 0


def crossing_parameter(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that lies in more than one bucket."""
    if failure.index is None:
        return False
    size = round_bucket(_bucket(scenario, failure), scenario.world)
    offsets = accumulate((parameter.numel for parameter in scenario.parameters), initial=0)
    start, end = list(pairwise(offsets))[failure.index]
    return start // size != (end - 1) // size


def if_named(place: Place) -> Place:
    """This one, unless nobody is named: the logs of two ranks alone do not tell which of them called the wrong one."""

    def right(scenario: Scenario, failure: Failure) -> bool:
        return failure.rank is None or place(scenario, failure)

    return right


def every(*places: Place) -> Place:
    """All of these."""

    def right(scenario: Scenario, failure: Failure) -> bool:
        return all(place(scenario, failure) for place in places)

    return right


def parameter_on_one_rank(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that lies in one piece of one bucket."""
    if failure.index is None:
        return False
    partition = Partition.from_request(scenario.numel, scenario.world, _bucket(scenario, failure))
    start = sum(parameter.numel for parameter in scenario.parameters[: failure.index])
    end = start + scenario.parameters[failure.index].numel
    return partition.owner(start) == partition.owner(end - 1)


def strided_parameter(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that is not contiguous."""
    if failure.index is None:
        return False
    parameter = scenario.parameters[failure.index]
    return parameter.strides != "contiguous" and sum(dim > 1 for dim in parameter.shape) > 1


def behind_another_parameter(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that is not the first one with elements."""
    before = scenario.parameters[: failure.index or 0]
    return any(parameter.numel for parameter in before)


def behind_an_empty_parameter(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter somewhere behind one that has none."""
    before = scenario.parameters[: failure.index or 0]
    return any(parameter.numel == 0 for parameter in before)


def matrix(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter of two or more dimensions."""
    return failure.index is not None and len(scenario.parameters[failure.index].shape) > 1


def bucket_of_one_each(scenario: Scenario, failure: Failure) -> bool:
    """An element of a bucket in which every rank owns one element, padding included."""
    partition = Partition.from_request(scenario.numel, scenario.world, _bucket(scenario, failure))
    return failure.bucket is not None and partition.buckets[failure.bucket].padded == scenario.world


def behind_piece_edge(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that begins in an earlier piece."""
    if failure.offset is None or failure.element is None:
        return False
    partition = Partition.from_request(scenario.numel, scenario.world, _bucket(scenario, failure))
    return partition.owner(failure.offset) != partition.owner(failure.offset - failure.element)


def vector_parameter(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter of one dimension."""
    return failure.index is not None and len(scenario.parameters[failure.index].shape) == 1


def parameter_beyond_bf16(scenario: Scenario, failure: Failure) -> bool:
    """An element of a parameter that has more bits than bf16."""
    return failure.index is not None and scenario.parameters[failure.index].dtype != "bf16"


def not_the_owner(scenario: Scenario, failure: Failure) -> bool:
    """A rank that does not own the element."""
    return failure.owner is not None and failure.rank != failure.owner


def _bucket(scenario: Scenario, failure: Failure) -> int:
    """The requested bucket size of the instance that failed: a rebuild may have changed it."""
    return next((plan.bucket for plan in steps(scenario) if plan.index == failure.step), scenario.bucket)


def of_dtype(dtype: str) -> Place:
    """An element of a parameter of this dtype."""

    def right(scenario: Scenario, failure: Failure) -> bool:
        return failure.index is not None and scenario.parameters[failure.index].dtype == dtype

    return right


def without_gradient(scenario: Scenario, failure: Failure) -> bool:
    """A parameter that has no gradient on some rank in some part of the step."""
    step = next((plan for plan in steps(scenario) if plan.index == failure.step), None)
    return step is not None and any(failure.index in missing for part in step.parts for missing in part.none)
