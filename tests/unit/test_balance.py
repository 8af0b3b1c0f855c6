"""What `list --plan` makes of an answer: numbers of the core's, in a table and in a sentence when there are none."""

from __future__ import annotations

import sys

import pytest

from harness.balance import owners
from harness.balance.child import answer
from harness.balance.messages import Matrix, Model, Question, decode_answer, decode_question, encode

SQUARE = Model("square", tuple(Matrix(f"w{index}", (8, 8)) for index in range(3)))


def test_an_answer_has_every_model_world_and_rule_in_order() -> None:
    thin = Model("thin", (Matrix("w", (1, 6)),))
    found = answer(decode_question(encode(Question((SQUARE, thin), (1, 2)))))
    assert decode_answer(encode(found)) == found
    assert [(row.preset, row.world, row.rule) for row in found.balances] == [
        (preset, world, rule)
        for preset in ("square", "thin")
        for world in (1, 2)
        for rule in ("newton_schulz", "numel")
    ]


def test_the_numbers_are_those_of_the_owners() -> None:
    """Three equal matrices on two ranks: two on one of them, or by the original rule, in one buffer, all."""
    ours, original = answer(Question((SQUARE,), (2,))).balances
    assert (ours.cost, ours.lower_bound, ours.balance) == (2 * 512, 2 * 512.0, 1.0)
    assert (ours.spread, ours.idle, ours.max_over_mean) == (0.5, 0, pytest.approx(4 / 3))
    assert (original.cost, original.balance, original.idle) == (3 * 512, 1.5, 1)


def test_each_row_of_the_table_has_its_numbers() -> None:
    printed = owners.lines(answer(Question((SQUARE,), (2,))))
    assert "square: 3 matrices, 192 elements" in printed
    ours, original = (line.split() for line in printed if "(default)" in line or "(original)" in line)
    assert ours == ["2", "newton_schulz", "(default)", "0.000", "G", "0.000", "G", "1.00", "1.33", "0.50", "0"]
    assert original == ["2", "numel", "(original)", "0.000", "G", "0.000", "G", "1.50", "2.00", "1.00", "1"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise ImportError('no torch here')", "no torch here"),
        ("print('not JSON')", "JSON is malformed"),
        ("pass", "truncated"),
    ],
)
def test_a_core_that_cannot_be_asked_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr(owners.process, "command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(
        owners.UnansweredError, match=rf"^list --plan: the core cannot be asked for its owners: .*{says}"
    ):
        owners.ask(("tiny-mlp",), (2,))
