"""What the parent and the ranks of a bench of Muon say to each other: plain data, no torch."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

System = Literal["unsharded", "newton_schulz", "numel"]
SYSTEMS: tuple[System, ...] = ("unsharded", "newton_schulz", "numel")


class Trained(Struct, frozen=True):
    """A parameter, bf16; ``muon``: orthogonalised whole."""

    name: str
    shape: tuple[int, ...]
    muon: bool


class RunSystem(Struct, frozen=True, kw_only=True):
    """Make ``steps`` steps, the first for nothing; reply with a :class:`SystemReport`."""

    system: System
    parameters: tuple[Trained, ...]
    steps: int
    seed: int


class SystemReport(Struct, frozen=True, kw_only=True):
    """One rank's run.

    Attributes:
        seconds: of each step that counts, from when all ranks had their gradients until this one had its weights.
        cpu_seconds: that this process computed in each of them.
        sent: bytes this process wrote in each of them, to sockets; None where the kernel does not count them.
        kept: bytes of all tensors alive between steps: weights, state, buffers.
        peak: bytes the process grew at its largest; None where the kernel does not tell.
        cost, elements: of the matrices this rank orthogonalises. ``lower_bound``: what the busiest cannot be below.
        digest: of the weights at the end.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    sent: tuple[int, ...] | None
    kept: int
    peak: int | None
    cost: int
    elements: int
    lower_bound: float
    digest: str


encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(RunSystem).decode
decode_report = msgspec.msgpack.Decoder(SystemReport).decode
