"""Who is named when the collectives of the ranks differ, and as what: hand-made logs, one for each kind of mistake."""

from __future__ import annotations

import pytest

from harness.drive.traffic import implied
from harness.oracles import sequence
from harness.oracles.sequence import LEAVE, Log, differences
from harness.scenario.model import AdamW, Build, Clip, Domain, Parameter, Part, Scenario, Step, Values
from harness.verdict import Collective, Divergence, Property, Stage

WORLD = 3
LONG, SHORT = ("reduce_scatter", "fp32", 96), ("reduce_scatter", "fp32", 48)
NORM, GATHER = ("all_reduce", "fp32", 1), ("all_gather", "bf16", 32)

Call = tuple[str, str, int]


def step(index: int, reduce: list[Call], norm: list[Call], gather: list[Call], world: int = WORLD) -> list[Collective]:
    """One step's calls by stage."""
    group = tuple(range(world))
    return [
        Collective(*call, group, index, stage)
        for stage, calls in (("reduce", reduce), ("norm", norm), ("gather", gather))
        for call in calls
    ]


def usual(index: int, world: int = WORLD) -> list[Collective]:
    return step(index, [LONG, LONG, SHORT], [NORM], [GATHER, GATHER], world)


def found(*logs: list[Collective], whole: tuple[bool, ...] | None = None, **options: object) -> Divergence | None:
    """The earliest difference."""
    ended = whole or (True,) * len(logs)
    given = [Log(log, end) for log, end in zip(logs, ended, strict=True)]
    seen, compared = differences(given, **options)  # type: ignore[arg-type]
    assert compared > 0
    return min(seen, key=lambda divergence: divergence.when, default=None)


def test_equal_logs_have_no_difference_and_each_call_is_counted() -> None:
    logs = [Log(usual(0), True)] * WORLD

    assert differences(logs) == ([], 6)


@pytest.mark.parametrize("deviant", [0, 70, 199])
def test_in_a_large_world_equal_logs_are_compared_once(deviant: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs count, and are accused alike; but there are 19900 of them."""
    compared = []
    original = sequence._first_difference
    monkeypatch.setattr(sequence, "_first_difference", lambda *args: compared.append(args[1:3]) or original(*args))
    logs = [Log(usual(0, 200), True) for _ in range(200)]
    logs[deviant] = Log(usual(0, 200)[1:], True)

    seen, num_compared = differences(logs)

    assert len(compared) <= 3
    assert len(seen) == 199
    assert {divergence.rank for divergence in seen} == {deviant}
    assert num_compared == 199 * 198 // 2 * 6 + 199 * 2


def test_groups_of_some_ranks_are_compared_among_their_members() -> None:
    """Equal logs alone do not make two pairs alike: what counts is which groups hold both ranks."""
    pairs = [
        Collective("all_reduce", "fp32", length, group, 0, "norm") for length in (1, 2) for group in ((0, 1), (2, 3))
    ]
    logs = [Log([call for call in pairs if rank in call.group], True) for rank in range(4)]
    logs[3] = Log(logs[3].calls[:1], True)

    seen, _ = differences(logs)

    assert [(divergence.rank, divergence.actual) for divergence in seen] == [(None, None)]
    assert "rank 2" in seen[0].message
    assert "rank 3" in seen[0].message


def test_a_single_rank_compares_with_nobody() -> None:
    assert differences([Log(usual(0, 1), True)]) == ([], 0)


@pytest.mark.parametrize("deviant", range(WORLD))
@pytest.mark.parametrize(
    ("reduce", "norm", "gather", "said", "stage"),
    [
        ([LONG, SHORT], [NORM], [GATHER] * 2, "skipped that collective", "reduce"),
        ([LONG, LONG], [NORM], [GATHER] * 2, "skipped that collective and went on to stage norm", "reduce"),
        ([LONG] * 3 + [SHORT], [NORM], [GATHER] * 2, "called one too many", "reduce"),
        (
            [LONG, LONG, SHORT],
            [NORM] * 2,
            [GATHER] * 2,
            "called one too many in stage norm, unless the others left it out",
            "norm",
        ),
        ([LONG, LONG, SHORT], [NORM], [GATHER], "ended without that collective", "gather"),
        ([LONG, LONG, SHORT], [NORM], [GATHER] * 3, "called one too many", "gather"),
        ([LONG, SHORT, LONG], [NORM], [GATHER] * 2, "called the collectives of this stage in another order", "reduce"),
    ],
)
def test_each_kind_of_mistake_is_named_with_the_rank(
    deviant: int, reduce: list[Call], norm: list[Call], gather: list[Call], said: str, stage: str
) -> None:
    logs = [usual(0) for _ in range(WORLD)]
    logs[deviant] = step(0, reduce, norm, gather)

    difference = found(*logs)

    assert difference is not None
    assert (difference.property, difference.rank, difference.step) == (Property.TRAFFIC, deviant, 0)
    assert difference.stage is Stage(stage)
    assert difference.message.endswith(f": rank {deviant} {said}")


def colored(rank: int) -> list[Collective]:
    """Of five ranks two pairs have buffers of their own, not equally many, and the last has none; all have one."""
    own = {(0, 1): [64, 64], (2, 3): [64]}
    calls = [Collective("reduce", "fp32", 96, (0, 1, 2, 3, 4), 0, "reduce", "root 0")]
    for group, lengths in own.items():
        if rank in group:
            calls += [
                Collective("reduce", "fp32", n, group, 0, "reduce", f"root {group[0]} on group 7") for n in lengths
            ]
    return [*calls, Collective("all_reduce", "fp64", 1, (0, 1, 2, 3, 4), 0, "norm")]


def test_groups_of_colors_may_have_other_buffers() -> None:
    logs = [Log(colored(rank), True) for rank in range(5)]

    seen, num_compared = differences(logs)

    assert seen == []
    assert num_compared == 10 * 2 + 2 + 1


def test_a_rank_that_takes_its_colors_first_is_told_within_its_group_and_among_all() -> None:
    logs = [Log(colored(rank), True) for rank in range(5)]
    calls = list(logs[3].calls)
    logs[3] = Log([calls[1], calls[0], calls[2]], True)

    seen, _ = differences(logs)

    assert len(seen) == 1
    assert "rank 2" in seen[0].message
    assert "rank 3" in seen[0].message


@pytest.mark.parametrize("deviant", range(WORLD))
@pytest.mark.parametrize("other", [("all_reduce", "fp32", 96), ("reduce_scatter", "bf16", 96), SHORT])
def test_a_world_that_hangs_at_another_call_has_only_the_call_to_tell(deviant: int, other: Call) -> None:
    """Nothing is known of what would have come after: the message says what was called, and no more."""
    logs = [step(0, [LONG, LONG], [], []) for _ in range(WORLD)]
    logs[deviant] = step(0, [LONG, other], [], [])

    difference = found(*logs, whole=(False,) * WORLD)

    assert difference is not None
    assert difference.rank == deviant
    sound = ", ".join(str(rank) for rank in range(WORLD) if rank != deviant)
    assert difference.message == (
        f"rank {deviant} called {other[0]} {other[1]}[{other[2]}] as its 2nd collective "
        f"while ranks {sound} called reduce_scatter fp32[96]"
    )


@pytest.mark.parametrize("deviant", range(WORLD))
def test_a_rank_that_reduces_otherwise_is_named(deviant: int) -> None:
    """Equal in kind, dtype and length: the backend notices nothing, and the values are wrong on other ranks."""
    logs = [usual(0) for _ in range(WORLD)]
    logs[deviant][1] = Collective(*LONG, (0, 1, 2), 0, "reduce", "with MAX")

    difference = found(*logs)

    assert difference is not None
    assert (difference.rank, difference.stage) == (deviant, Stage.REDUCE)
    assert f"rank {deviant} called reduce_scatter fp32[96] with MAX as its 2nd collective" in difference.message


def test_of_two_ranks_the_one_that_does_not_sum_where_the_layout_says_so_is_named() -> None:
    logs = [step(0, *OWN, 2), step(0, *OWN, 2)]
    logs[0][0] = Collective(*OWN[0][0], (0, 1), 0, "reduce", "with MAX")

    difference = found(*logs, implied=implied(scenario()))

    assert difference is not None
    assert difference.rank == 0


def test_a_rank_that_leaves_the_group_is_said_to() -> None:
    logs = [usual(0) for _ in range(WORLD)]
    logs[1] = [*usual(0)[:3], Collective(LEAVE, "", 0, (0, 1, 2), 0, "norm")]

    difference = found(*logs, whole=(False,) * WORLD)

    assert difference is not None
    assert difference.rank == 1
    assert difference.message == (
        "rank 1 called destroy_process_group() as its 4th collective while ranks 0, 2 called all_reduce fp32[1]: "
        "rank 1 left the group"
    )


def test_a_log_that_ends_early_is_no_difference() -> None:
    assert found(usual(0), usual(0)[:2], usual(0), whole=(True, False, True)) is None


# --- two ranks: no majority -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviant", [0, 1])
def test_of_two_ranks_the_one_that_leaves_the_habit_of_earlier_steps_is_named(deviant: int) -> None:
    logs = [usual(0, 2) + usual(1, 2) + usual(2, 2) + usual(3, 2) for _ in range(2)]
    logs[deviant] = usual(0, 2) + usual(1, 2) + step(2, [LONG, LONG], [NORM], [GATHER] * 2, 2) + usual(3, 2)

    difference = found(*logs)

    assert difference is not None
    assert (difference.rank, difference.step, difference.stage) == (deviant, 2, Stage.REDUCE)
    assert "skipped that collective and went on to stage norm" in difference.message


@pytest.mark.parametrize("deviant", [0, 1])
@pytest.mark.parametrize("num_before", [1, 3])
def test_of_two_ranks_nobody_is_named_where_steps_differ_anyway_or_there_was_but_one(
    deviant: int, num_before: int
) -> None:
    """A first step may rightly have more collectives than all that follow: who repeats that is wrong, not the other."""
    first = [call for at in range(num_before - 1) for call in usual(at, 2)]
    at = num_before - 1
    fuller = step(at, [LONG, LONG], [NORM], [GATHER] * 2, 2)
    logs = [first + fuller + usual(at + 1, 2) + usual(at + 2, 2) for _ in range(2)]
    logs[deviant] = first + fuller + step(at + 1, [LONG, LONG], [NORM], [GATHER] * 2, 2) + usual(at + 2, 2)

    difference = found(*logs)

    assert difference is not None
    assert (difference.rank, difference.step) == (None, at + 1)


def test_of_two_ranks_in_their_first_step_neither_is_named() -> None:
    difference = found(usual(0, 2), step(0, [LONG, LONG], [NORM], [GATHER] * 2, 2))

    assert difference is not None
    assert difference.rank is None
    assert difference.message.endswith("two logs alone do not tell which of them is wrong (three would: --world 3)")


def scenario() -> Scenario:
    """48 elements in buckets of 16, two ranks, one clipped step."""
    return Scenario(
        world=2,
        seed=0,
        parameters=(Parameter("w", (48,)),),
        values=Values(Domain.EXACT, 3, 0),
        optimizer=AdamW(),
        operations=(Build(16), Part(False, (0, 1), ((), ())), Clip(1.0), Step()),
    )


BUCKET = ("reduce_scatter", "fp32", 16)
OWN = ([BUCKET] * 3, [("all_reduce", "fp64", 1)] * 2, [("all_gather", "bf16", 8)] * 3)


def test_what_the_layout_implies_is_what_it_should_be() -> None:
    of = implied(scenario())

    assert [of(0, stage) for stage in ("collect", "reduce", "norm", "update", "gather")] == [
        [],
        OWN[0],
        OWN[1],
        [],
        OWN[2],
    ]
    assert of(None, "build") is None
    assert of(1, "reduce") is None


@pytest.mark.parametrize("deviant", [0, 1])
@pytest.mark.parametrize(
    ("calls", "stage"),
    [
        ((OWN[0][:2], OWN[1], OWN[2]), "reduce"),
        ((OWN[0] + [BUCKET], OWN[1], OWN[2]), "reduce"),
        ((OWN[0], OWN[1][:1], OWN[2]), "norm"),
        ((OWN[0], OWN[1] + OWN[1][:1], OWN[2]), "norm"),
        ((OWN[0], OWN[1], OWN[2][:2]), "gather"),
        ((OWN[0], OWN[1], OWN[2] + OWN[2][:1]), "gather"),
        (([BUCKET, ("reduce_scatter", "bf16", 16), BUCKET], OWN[1], OWN[2]), "reduce"),
        (([], OWN[1], OWN[2]), "reduce"),
        ((OWN[0], [], OWN[2]), "norm"),
        ((OWN[0], OWN[1], []), "gather"),
    ],
)
def test_of_two_ranks_the_one_that_leaves_the_layout_is_named(
    deviant: int, calls: tuple[list[Call], list[Call], list[Call]], stage: str
) -> None:
    logs = [step(0, *OWN, 2), step(0, *OWN, 2)]
    logs[deviant] = step(0, *calls, 2)

    difference = found(*logs, implied=implied(scenario()))

    assert difference is not None
    assert (difference.rank, difference.stage) == (deviant, Stage(stage))


def test_another_root_is_named() -> None:
    logs = [[Collective("broadcast", "bf16", 9, (0, 1, 2), 0, "gather", f"root {int(rank == 2)}")] for rank in range(3)]

    difference = found(*logs)

    assert difference is not None
    assert difference.rank == 2
    assert difference.message == (
        "rank 2 called broadcast bf16[9] root 1 as its 1st collective while ranks 0, 1 called broadcast bf16[9] root 0"
    )


def test_groups_of_the_same_ranks_in_another_order_are_told_apart() -> None:
    """Equal calls on two groups, in another order on one rank: a deadlock in which all logs would look alike."""
    on = [Collective(*NORM, (0, 1, 2), 0, "norm", f"on group {number}") for number in (1, 2)]

    difference = found(on, on[::-1], on)

    assert difference is not None
    assert difference.rank == 1
    assert difference.message == (
        "rank 1 called all_reduce fp32[1] on group 2 as its 1st collective while ranks 0, 2 called all_reduce fp32[1] "
        "on group 1: rank 1 called the collectives of this stage in another order"
    )
