"""Asks how matrices of presets are dealt out, and says it in a table. The parent's side: no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import groupby

import msgspec

from harness.balance.messages import RULES, Answer, Balance, Matrix, Model, Question, decode_answer, encode
from harness.launch import process
from harness.scenario.presets import muon_matrices

PRESETS = ("gpt2", "qwen2.5-0.5b")
WORLDS = (8, 64)
MUON = "every 2-D matrix but embeddings and the output head"
_HEAD = f"  {'world':>5}  {'rule':<24}{'largest load':>14}  {'lower bound':>14}  ratio  max/mean  spread  idle ranks"
_STDOUT = 1
_TIMEOUT_S = 120.0  # for what takes two seconds on a quiet machine: importing torch


class UnansweredError(Exception):
    """The child process gave no answer."""


def ask(presets: Sequence[str], worlds: Sequence[int]) -> Answer:
    """The balance of each preset at each world by each rule, computed in a child process.

    Raises:
        UsageError: no such preset.
        UnansweredError: the core cannot be imported, or does not answer.
    """
    models = tuple(
        Model(preset, tuple(Matrix(item.name, item.shape) for item in muon_matrices(preset))) for preset in presets
    )
    command = process.command("harness.balance.child", process.import_path(), _STDOUT)
    question = encode(Question(models, tuple(worlds)))
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=_TIMEOUT_S, check=True)
        return decode_answer(b"".join(done.stdout.splitlines()[-1:]))  # an import may print lines of its own before
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        printed = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise UnansweredError(
            f"list --plan: the core cannot be asked for its owners: {(printed or [error])[-1]}"
        ) from None


def lines(answer: Answer) -> list[str]:
    """What is dealt out and how it is counted, then a table for each preset."""
    shown = [
        f"owners of whole matrices: {MUON}, however it is cut",
        "cost of a matrix: max(rows, columns) * min(rows, columns)^2, what one product of Newton-Schulz multiplies",
        "lower bound: the largest of the mean, the largest matrix, and what whole matrices allow",
        "original rule: by elements, over as many ranks as there are buffers of 256 MB begun",
    ]
    for preset, balances in groupby(answer.balances, key=lambda balance: balance.preset):
        rows = list(balances)
        shown += ["", f"{preset}: {rows[0].matrices} matrices, {rows[0].elements:,} elements"]
        shown.append(_HEAD)
        shown += [_row(balance) for balance in rows]
    return [*shown, "", "spread: of elements, (max - min) / max over ranks"]


def _row(found: Balance) -> str:
    rule = f"{found.rule} ({RULES[found.rule]})"
    return (
        f"  {found.world:>5}  {rule:<24}{found.cost / 1e9:>12.3f} G  {found.lower_bound / 1e9:>12.3f} G"
        f"  {found.balance:5.2f}  {found.max_over_mean:8.2f}  {found.spread:6.2f}  {found.idle:>10}"
    )
