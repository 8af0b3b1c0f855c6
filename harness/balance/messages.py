"""What is asked and answered about owners of matrices: plain data, no torch."""

from __future__ import annotations

import msgspec
from msgspec import Struct

RULES = {"newton_schulz": "default", "numel": "original"}


class Matrix(Struct, frozen=True):
    """A parameter that has one owner."""

    name: str
    shape: tuple[int, ...]


class Model(Struct, frozen=True):
    """The matrices of a preset that are Muon's."""

    preset: str
    matrices: tuple[Matrix, ...]


class Question(Struct, frozen=True):
    """Deal out each model at each world by each rule."""

    models: tuple[Model, ...]
    worlds: tuple[int, ...]
    rules: tuple[str, ...] = tuple(RULES)


class Balance(Struct, frozen=True, kw_only=True):
    """One model at one world by one rule.

    Attributes:
        cost: of the rank that has most: ``max(rows, columns) * min(rows, columns) ** 2``, summed over its matrices.
        lower_bound: what no way of dealing them out can be below. ``balance``: ``cost / lower_bound``.
        max_over_mean: ``cost`` against the mean over ranks.
        spread: of the elements, ``(max - min) / max`` over ranks. ``idle``: ranks without any.
    """

    preset: str
    matrices: int
    elements: int
    world: int
    rule: str
    cost: int
    lower_bound: float
    balance: float
    max_over_mean: float
    spread: float
    idle: int


class Answer(Struct, frozen=True):
    """In the order asked: models, worlds, rules."""

    balances: tuple[Balance, ...]


encode = msgspec.json.Encoder().encode
decode_question = msgspec.json.Decoder(Question).decode
decode_answer = msgspec.json.Decoder(Answer).decode
