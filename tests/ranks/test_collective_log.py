"""The log of collectives: every outermost call, under one name for all its spellings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch.distributed as dist

from harness.launch.pool import RankPool

LONG_S = 60.0


@pytest.fixture(scope="module")
def by_start(pool: RankPool) -> Iterator[dict[str, RankPool]]:
    """The warm pool, and one whose ranks are fresh interpreters."""
    with RankPool("tests.ranks.handlers:simple", start="exec") as fresh:
        yield {"fork": pool, "exec": fresh}


def logged(pool: RankPool, series: str) -> list[list[list[Any]]]:
    """What each rank of world 2 has logged of a series: kind, dtype, length, ranks of the group, label.

    After these what else all ranks must agree on, where there is something.
    """
    outcome = pool.run(2, json.dumps({"do": "collectives", "series": series}).encode(), timeout_s=LONG_S)
    assert outcome.replied, outcome
    replies = [json.loads(report.reply or b"") for report in outcome.ranks]
    for entry in chain(*replies):
        entry[-1] = re.sub(r"on group \d+", "on group N", entry[-1])  # Torch counts on from task to task.
    return [[entry if entry[-1] else entry[:-1] for entry in reply] for reply in replies]


def spellings(*names: str) -> int:
    return sum(hasattr(dist, name) for name in names)


def test_reductions(pool: RankPool) -> None:
    """Positional, by keyword, imported by name, asynchronous, lists and single tensors, old names and new."""
    both = [0, 1], "series"
    expected = [
        ["all_reduce", "float32", 5, *both],
        ["all_reduce", "bfloat16", 6, *both, "with MAX"],
        ["all_reduce", "float64", 6, *both],
        ["all_reduce", "float32", 7, *both],
        ["reduce", "float32", 8, *both, "root 0"],
        ["reduce_scatter_list", "float32", 6, *both],
        *[["reduce_scatter", "float32", 8, *both]]
        * spellings("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"),
        ["reduce_scatter", "float32", 4, *both],
    ]

    assert logged(pool, "reductions") == [expected, expected]


def test_gathers(pool: RankPool) -> None:
    """The length is what the rank puts in, and the same on every rank."""
    both = [0, 1], "series"
    expected = [
        ["all_gather", "float32", 3, *both],
        *[["all_gather", "float32", 4, *both]]
        * spellings("all_gather_into_tensor", "_all_gather_base", "all_gather_single"),
        ["broadcast", "float32", 5, *both, "root 0"],
        ["gather", "float32", 6, *both, "root 0"],
        ["scatter", "float32", 7, *both, "root 0"],
        ["all_to_all", "float32", 4, *both],
    ]

    assert logged(pool, "gathers") == [expected, expected]


def test_only_the_outermost_call_is_recorded(pool: RankPool) -> None:
    """A collective of objects is one entry, whatever tensors it sends."""
    kinds = ["all_gather_object", "broadcast_object_list", "scatter_object_list", "barrier", "barrier"]
    expected = [[kind, "", 0, [0, 1], "series", *(["root 0"] if "_list" in kind else [])] for kind in kinds]

    assert logged(pool, "objects") == [expected, expected]


def test_point_to_point(pool: RankPool) -> None:
    """Sends and receives, alone and in a batch."""
    entries = [["float32", length, [0, 1], "series"] for length in (3, 4, 5)]

    assert logged(pool, "point to point") == [[[kind, *entry] for entry in entries] for kind in ("send", "recv")]


def test_groups(pool: RankPool) -> None:
    """Making a group is an entry on all ranks; a call through a group is one on its members, with their ranks."""
    common = [
        ["new_group", "", 0, [0, 1], "series", "of ranks 0, 1"],
        ["new_group", "", 0, [0, 1], "series", "of rank 1"],
        ["all_reduce", "float32", 3, [0, 1], "group", "on group N"],
        ["all_reduce", "float32", 4, [0, 1], "group"],
    ]

    assert logged(pool, "groups") == [common, [*common, ["all_reduce", "float32", 5, [1], "group", "on group N"]]]


def test_a_wrong_call_raises_what_torch_raises(pool: RankPool) -> None:
    """The log neither hides the error nor raises its own, and goes on."""
    for entries in logged(pool, "failures"):
        assert entries[-1] == ["all_reduce", "float32", 1, [0, 1], "series"]


def test_begin_forgets(pool: RankPool) -> None:
    """begin() drops the entries and the label; so does the beginning of a task."""
    expected = [["barrier", "", 0, [0, 1], None]]

    assert logged(pool, "beginning") == [expected, expected]
    assert logged(pool, "beginning") == [expected, expected]


def test_fresh_interpreters_log_the_same(by_start: dict[str, RankPool]) -> None:
    """The functions are replaced before the handler's module is imported, however the rank was started."""
    assert logged(by_start["exec"], "reductions") == logged(by_start["fork"], "reductions")


def test_what_all_ranks_must_agree_on_is_recorded(pool: RankPool) -> None:
    """The root by its rank in all, also where it is named by that in the group; who must ask for a new group."""
    entries = logged(pool, "agreements")[0]
    pool.recycle(2)  # They have left their group.

    assert [(kind, group, how) for kind, _, _, group, _, *how in entries] == [
        ("new_group", [0, 1], ["of ranks 0, 1"]),
        ("broadcast", [0, 1], ["root 1"]),
        ("broadcast", [0, 1], ["root 1 on group N"]),
        ("reduce", [0, 1], ["with MIN root 1"]),
        ("new_group", [0], ["of rank 0"]),
        ("destroy_process_group", [0, 1], []),
    ]
