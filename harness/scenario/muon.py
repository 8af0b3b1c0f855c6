"""What a scenario of a Muon optimizer has beside what every scenario has: marks, settings, sharding, colours.

Pure data, a part of :class:`harness.scenario.model.Scenario`. Its operations are those of any scenario: ``Build``
constructs the inner optimizer and the sharding one (``bucket`` is the size of a fused buffer, in elements), ``Part`` is
one backward, ``Step`` calls ``reduce_gradients``, ``step`` and ``clear_grad``, ``Discard`` clears what was gathered
before any reduction, ``Skip`` after it, ``Rate`` sets the learning rate of both sets, ``Reload`` saves and loads.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Rank = Annotated[int, Meta(ge=0, le=255)]
Size = Annotated[int, Meta(ge=1, le=2**31)]

Use = Literal["once", "twice", "reentrant"]
"""How often a backward uses a parameter: once; twice in one graph; in two re-entrant checkpoints."""


class Mark(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one parameter is to be treated.

    Attributes:
        muon: orthogonalised as a whole matrix; else element by element (AdamW).
        split: into which blocks along its rows (the dimension before the last) it is cut before Newton-Schulz.
        sizes: rows of each block, of ``"qkv"`` (three) and ``"gate_up"`` (two).
        num_heads: of ``"heads"``: so many blocks of as many rows each.
        lr_scale, weight_decay, need_clip: of :class:`zero2core.MuonParamInfo`.
        color: index in :attr:`Muon.colors`; None: the default group.
        use: in a backward; of ``Muon.backward`` ``"autograd"``.
        main_grad: its gradient comes in ``main_grad``, fp32, and ``.grad`` stays None.
    """

    muon: bool = False
    split: Literal["none", "qkv", "heads", "gate_up"] = "none"
    sizes: Annotated[tuple[Size, ...], Meta(max_length=3)] = ()
    num_heads: Annotated[int, Meta(ge=1, le=1024)] = 1
    lr_scale: Annotated[float, Meta(ge=0, le=10)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, le=10)] | None = None
    need_clip: bool = True
    color: Annotated[int, Meta(ge=0, le=63)] | None = None
    use: Use = "once"
    main_grad: bool = False


class Color(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A colour: parameters of it belong to groups of their own.

    Attributes:
        groups: disjoint groups of ranks, ascending each; a rank's is the one it is in. A rank in none is outside: the
            parameter of that name is not trained there.
        divisor: of the averaged gradient; None: the size of the group.
    """

    groups: Annotated[tuple[Annotated[tuple[Rank, ...], Meta(min_length=1)], ...], Meta(min_length=1)]
    divisor: Annotated[float, Meta(gt=0)] | None = None


class MuonSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of Muon; those of the element-wise set are the scenario's ``optimizer``."""

    lr: Annotated[float, Meta(ge=0, le=10)] = 2e-2
    beta: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    nesterov: bool = True
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.1
    ns_steps: Annotated[int, Meta(ge=0, le=16)] = 5
    ns_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-7
    coefficients: Literal["simple", "quintic", "polar_express", "aol"] = "simple"
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    scale: Literal["original", "spectral", "match_rms_adamw"] = "match_rms_adamw"


class Sharding(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of :class:`zero2core.MuonShardingConfig`; ``fused`` False: ``comm_buffer_size_mb`` is 0."""

    fused: bool = True
    owner_rule: Literal["newton_schulz", "numel"] = "newton_schulz"
    owner_cap: Annotated[float, Meta(ge=1, le=100)] = 1.3
    use_reduce_avg: bool = True
    comm_overlap: bool = False
    accumulate_steps: Annotated[int, Meta(ge=1, le=64)] = 1
    release_gradients: bool = False
    fuse_optimizer_states: bool = False
    two_hop: bool = False
    local_world_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    skip_missing: bool = False


class GlobalClip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="global"):
    """``ClipGradByGlobalNorm(max_norm)``."""

    max_norm: Annotated[float, Meta(gt=0)]


class AdaptiveClip(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="adaptive"):
    """``ClipGradByAdaptiveNorm(...)``; ``warmup_steps`` in steps."""

    ratio: Annotated[float, Meta(gt=0)] = 1.04
    warmup_steps: Annotated[int, Meta(ge=0, le=1000)] = 1
    beta: Annotated[float, Meta(ge=0, le=1)] = 0.99
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-8


class Muon(Struct, frozen=True, forbid_unknown_fields=True):
    """What a scenario of system ``"muon"`` has.

    Attributes:
        marks: one for each parameter.
        multiple: every integer of a gradient is multiplied by it, so that means over the groups in play are exact.
        backward: gradients are assigned to ``.grad``, or come out of autograd, which fires hooks.
        no_sync: all parts of a step but its last run in ``no_sync()``.
        release_color: before each step the storage of the compute weights of this colour (``-1``: the default) is
            given up; None: of none.
    """

    marks: tuple[Mark, ...]
    settings: MuonSettings = MuonSettings()
    sharding: Sharding = Sharding()
    colors: Annotated[tuple[Color, ...], Meta(max_length=64)] = ()
    clip: GlobalClip | AdaptiveClip | None = None
    multiple: Annotated[int, Meta(ge=1, le=255)] = 1
    backward: Literal["assign", "autograd"] = "autograd"
    no_sync: bool = False
    release_color: Annotated[int, Meta(ge=-1, le=63)] | None = None
