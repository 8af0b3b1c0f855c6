"""Where the wrong values lie, in a line."""

from __future__ import annotations

import numpy as np

from harness.diagnosis.evidence import EVERY_RANK, Evidence, Ints
from harness.oracles.sequence import ranks_text

_NAMED = 4


def pattern(evidence: Evidence) -> str:
    """How many of how many values are wrong, on which ranks, in which buckets, pieces and parameters."""
    slots, wrong = evidence.slots, evidence.wrong
    judged = ~slots.padding
    padding = int((wrong & slots.padding).sum())
    count = int((wrong & judged).sum())
    texts = [f"{count:,} of {int(judged.sum()):,} elements"]
    if padding:
        texts.append(f"{padding:,} of {int(slots.padding.sum()):,} elements of padding")
    observers = np.unique(slots.observer[wrong])
    if observers.size and observers[0] != EVERY_RANK:
        all_ranks = np.unique(slots.observer)
        texts.append("on every rank" if observers.size == all_ranks.size else f"on {ranks_text(observers.tolist())}")
    else:
        texts.append("alike on every rank")
    texts.append(_of("bucket", np.unique(slots.bucket[wrong]), len(evidence.partition.buckets)))
    if observers.size and observers[0] == EVERY_RANK:
        owners = np.unique(slots.owner[wrong])
        if owners.size < evidence.partition.world:
            texts.append(f"in pieces of {ranks_text(owners.tolist())}")
    indices = np.unique(slots.parameter[wrong & judged])
    if indices.size:
        names = [evidence.scenario.parameters[int(index)].name for index in indices]
        total = sum(1 for parameter in evidence.scenario.parameters if parameter.numel)
        if len(names) == total:
            texts.append("in every parameter")
        else:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            texts.append(f"in {len(names)} of {total} parameters ({', '.join(names[:_NAMED])}{more})")
    flat = np.unique(slots.flat[wrong & judged])
    if flat.size > 1:
        runs = 1 + int((np.diff(flat) > 1).sum())
        texts.append("in one run" if runs == 1 else f"in {runs} runs")
    return ", ".join(texts)


def _of(noun: str, found: Ints, total: int) -> str:
    if found.size == total:
        return f"in every {noun}" if total > 1 else f"in the only {noun}"
    named = ", ".join(str(each) for each in found[:_NAMED].tolist())
    more = ", ..." if found.size > _NAMED else ""
    return f"in {found.size} of {total} {noun}s ({named}{more})"
