"""Do all ranks of a group mean the same thing? One tiny collective when they do, the first difference when not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from zero2core import collectives
from zero2core.collectives import Collective
from zero2core.errors import RankMismatchError

__all__ = ["AGREEMENT_COLLECTIVES", "gather_texts", "require_agreement"]

_DIGEST_LEN = hashlib.sha256().digest_size

AGREEMENT_COLLECTIVES = (Collective("all_gather", torch.uint8, _DIGEST_LEN),)
"""What :func:`require_agreement` issues when all ranks agree."""


def require_agreement(
    what: str, facts: Sequence[str], *, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Raise on every rank unless ``facts`` (lines of text) are the same on all of them. Collective.

    All ranks exchange a digest of fixed size. Only when two differ are the facts themselves sent, in two further
    all-gathers, so that every rank can name the same first difference.

    Args:
        what: the caller, which the message begins with.
        facts: lines that must be equal, the most telling ones first. The lists may differ in length.
        device: where the exchanged tensors live; the group must serve it.

    Raises:
        RankMismatchError: on all ranks, with the first line in which two ranks differ.
    """
    text = "\n".join(facts).encode()
    digests = _gather_bytes(hashlib.sha256(text).digest(), group, device)
    if len(set(digests)) == 1:
        return
    lists = [sent.split("\n") for sent in gather_texts(text.decode(), group=group, device=device)]
    raise RankMismatchError(f"{what}: {first_difference(lists)}")


def gather_texts(text: str, *, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """What every rank gave, in rank order. Collective: two uint8 all-gathers.

    Collectives need equal lengths: the lengths are sent first, then the texts padded to the longest.
    """
    data = text.encode()
    lengths = [int.from_bytes(sent, "big") for sent in _gather_bytes(len(data).to_bytes(8, "big"), group, device)]
    texts = _gather_bytes(data.ljust(max(1, *lengths)), group, device)
    return [sent[:length].decode() for sent, length in zip(texts, lengths, strict=True)]


def first_difference(lists: Sequence[Sequence[str]]) -> str:
    """Name the first line in which some rank differs from rank 0; ``lists[r]`` are the lines of rank r."""
    for lines in zip_longest(*lists, fillvalue="nothing more"):
        for rank, line in enumerate(lines):
            if line != lines[0]:
                return f"ranks differ.\n  rank 0: {lines[0]}\n  rank {rank}: {line}\nGive every rank the same list."
    raise ValueError("the lists do not differ")


def _gather_bytes(data: bytes, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """What every rank sent, in rank order; all send the same number of bytes."""
    world = collectives.group_world(group) or 1
    source = torch.tensor(list(data), dtype=torch.uint8, device=device)
    output = torch.empty(world * len(data), dtype=torch.uint8, device=device)
    collectives.all_gather(output, source, group=group).wait()
    received = bytes(output.tolist())
    return [received[start : start + len(data)] for start in range(0, len(received), len(data))]
