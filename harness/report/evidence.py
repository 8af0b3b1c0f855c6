"""What the pictures of a failure are drawn from: where values are wrong, by how much, and how far each rank came.

Plain data, small enough to lie in a result: what is too much is left out, and its number said. No torch.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

State = Literal["agreed", "differs", "raised", "hung", "ended", "after"]
"""Of a rank at a stage. ``agreed``: nothing that differs was seen there. ``differs``: the first difference. ``raised``,
``hung``, ``ended``: it raised there, did not get on, or ended. ``after``: behind that, where nothing was compared."""


class Place(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a rank came: the step (None: before the first) and stage of ``state``; ``agreed`` is all the way."""

    rank: int
    step: int | None
    stage: str
    state: State


class Column(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of one step; of the build no step."""

    step: int | None
    stage: str


class Row(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's states, one for each column."""

    rank: int
    states: tuple[State, ...]


class Timeline(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ranks by stages in order of time. ``steps_left_out``: so many steps before these, in which nothing differed."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    steps_left_out: int = 0
    ranks_left_out: int = 0


class MapParameter(Struct, frozen=True, forbid_unknown_fields=True):
    """Flat elements ``[offset, offset + numel)``."""

    name: str
    offset: int
    numel: int


class MapBucket(Struct, frozen=True, forbid_unknown_fields=True):
    """Flat elements ``[start, end)``, padded to ``padded`` elements, which are cut into equal pieces, one a rank.

    ``wrong``: how many values are wrong in it, those of runs that were left out among them.
    """

    index: int
    start: int
    end: int
    padded: int
    wrong: int = 0


class WrongRun(Struct, frozen=True, forbid_unknown_fields=True):
    """``length`` wrong values, from ``place`` on in the padded bucket ``bucket``, on this rank (None: alike on all)."""

    rank: int | None
    bucket: int
    place: int
    length: int


class WrongValue(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One wrong value. ``ulps``: None where one of the two is not finite; ``parameter`` None: it lies in padding."""

    rank: int | None
    parameter: str | None
    element: int
    expected: str
    actual: str
    ulps: int | None


class RankUlps(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far a rank's wrong values are off. ``bins``: k -> values of 2**k to 2**(k+1) - 1 units of the last place."""

    rank: int | None
    bins: dict[int, int]
    not_finite: int = 0


class Map(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layout, and what is wrong in it. Every ``*_left_out`` counts what was too much to be kept.

    Attributes:
        quantity: what was compared.
        numel: elements of all parameters; ``compared``: values that ranks hold of them, ``wrong`` how many differ,
            ``wrong_padding`` how many more in padding.
        whole: every rank holds all elements, not only its pieces.
        unit: what an ulp is: of which dtype the last place.
    """

    quantity: str
    numel: int
    compared: int
    wrong: int
    wrong_padding: int
    whole: bool
    parameters: tuple[MapParameter, ...]
    buckets: tuple[MapBucket, ...]
    runs: tuple[WrongRun, ...]
    values: tuple[WrongValue, ...]
    ulps: tuple[RankUlps, ...]
    unit: str
    parameters_left_out: int = 0
    buckets_left_out: int = 0
    runs_left_out: int = 0


class Evidence(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one failing scenario. ``map`` is None where ranks kept no values, and ``no_map`` says why."""

    world: int
    map: Map | None = None
    no_map: str | None = None
    timeline: Timeline | None = None
