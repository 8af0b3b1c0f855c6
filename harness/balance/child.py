"""Asks the core's owner rules. Runs in a process of its own, since importing the core imports torch."""

from __future__ import annotations

import os
import sys
from typing import cast

from harness.balance.messages import Answer, Balance, Model, Question, decode_question, encode
from zero2core.muon.ownership import OwnerRule, Whole, assign_owners, load_of


def main(descriptor: int) -> None:
    """Answer the question on stdin with one line of JSON, written to ``descriptor``."""
    question = decode_question(sys.stdin.buffer.read())
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(encode(answer(question)) + b"\n")


def answer(question: Question) -> Answer:
    """The balance of every model at every world by every rule."""
    return Answer(
        tuple(
            _balance(model, world, rule)
            for model in question.models
            for world in question.worlds
            for rule in question.rules
        )
    )


def _balance(model: Model, world: int, rule: str) -> Balance:
    wholes = [Whole(matrix.name, matrix.shape) for matrix in model.matrices]
    load = load_of(wholes, assign_owners(wholes, world, rule=cast(OwnerRule, rule)), world)
    return Balance(
        preset=model.preset,
        matrices=len(wholes),
        elements=sum(load.elements),
        world=world,
        rule=rule,
        cost=max(load.cost),
        lower_bound=load.lower_bound,
        balance=load.balance,
        max_over_mean=load.max_over_mean,
        spread=load.spread,
        idle=load.num_idle,
    )
