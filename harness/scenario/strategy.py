"""What a scenario of a distribution strategy has beside what every scenario has: where parameters lie, how it wraps.

Pure data, a part of :class:`harness.scenario.model.Scenario`. The model is made from it: ``blocks`` of parameters and a
root, whose loss is linear in the parameters, so that any gradient can be had. Its operations are those of any scenario:
``Build`` wraps the model (``bucket``: elements of a bucket of DDP's), ``Part`` is one forward and one backward (whose
``none`` are the parameters that a rank does not use in it), ``Clip`` calls ``clip_grad_norm`` with a bound, ``Step``
steps the optimizer, ``Skip`` drops the gradients instead, ``Rate`` sets the learning rate.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from harness.scenario.muon import MuonSettings

Sharding = Literal["any", "none", "full", "hybrid"]
"""Who holds an element. ``none``: every rank; ``full``: one rank; ``hybrid``: one rank of each replica; ``any``: not
known, so nothing is asked."""

Reduce = Literal["fp32", "bf16"]
Accumulation = Literal["sync", "no_sync", "nested", "deferred", "flush"]
"""How parts but the last run. ``sync``: each is reduced by itself. ``no_sync``: nothing is reduced before the last.
``nested``: the same, the first of them in a second ``no_sync`` inside the first. ``deferred``: reduced over shards, and
over replicas in the last alone (``defer="all_reduce"``); without shards that is ``no_sync``. ``flush``: the last runs
in ``no_sync`` too, and ``flush`` reduces."""

ROOT = -1
"""``Place.block`` of a parameter of the model itself."""


class Place(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one parameter is, and how it is treated.

    Attributes:
        block: which block it is in, counted from 0 without gaps; -1: the root.
        frozen: takes no gradient, and must stay as it is.
        plain: left out of FSDP2, by a model that converts itself (``Strategy.converts``).
        tied: registered in its block under a second name, and used through both: half of the gradient comes from each.
        dedicated: marked for Muon, so that a dedicated strategy keeps it whole on one owner; a matrix.
    """

    block: Annotated[int, Meta(ge=ROOT, le=255)] = 0
    frozen: bool = False
    plain: bool = False
    tied: bool = False
    dedicated: bool = False


class Strategy(Struct, frozen=True, forbid_unknown_fields=True):
    """What a scenario of system ``"strategy"`` has.

    Attributes:
        places: one for each parameter.
        sharding: who holds what.
        replicas: of a hybrid mesh ``(replicas, world / replicas)``; else 1.
        reduce: dtype in which gradients are summed over ranks (and, before that, over parts that are not reduced).
        compute: dtype of the weights in a forward where the strategy casts them; parameters that it does not cast
            (of DDP, plain ones) have their own.
        accumulation: how parts but the last run.
        offload: sharded parameters, gradients and moments lie on the CPU.
        converts: the model has ``convert_to_fsdp``; else the strategy finds the blocks by itself.
        bare_root: with ``converts``: the root is no FSDP module; parameters of it are plain.
        unequal_start: ranks other than 0 begin with weights of their own, which wrapping must replace by rank 0's.
        multiple: every integer of a gradient is multiplied by it, so that means are exact.
        muon: settings for dedicated parameters; those of all others are the scenario's ``optimizer``.
    """

    places: tuple[Place, ...]
    sharding: Sharding = "any"
    replicas: Annotated[int, Meta(ge=1, le=256)] = 1
    reduce: Reduce = "fp32"
    compute: Reduce = "fp32"
    accumulation: Accumulation = "sync"
    offload: bool = False
    converts: bool = False
    bare_root: bool = False
    unequal_start: bool = False
    multiple: Annotated[int, Meta(ge=1, le=255)] = 1
    muon: MuonSettings = MuonSettings()


class Offer(Struct, frozen=True, omit_defaults=True):
    """What of a strategy may be drawn for a subject, beyond the contract (the defaults).

    Attributes:
        sharding: what it does.
        replicas: of a hybrid mesh, where fixed (of a world that they do not divide, as many as divide both); None: any
            number that divides the world.
        reduce, compute: dtypes it can be asked for, or has.
        dtypes: of all parameters, one of these (of a strategy that casts nothing: what it reduces in, too).
        offload: may be asked for.
        unused: ranks may differ in which parameters they use.
        tied, plain, unequal_start: see :class:`Place`, :class:`Strategy`; ``plain`` with ``converts``, ``bare_root``.
        deferred, flush: modes of accumulation.
        dedicated: matrices are marked for Muon, one at least: a strategy that is for them has nothing to do without.
        rounds: the order of roundings is known (one reduction for each axis of the mesh, then one division), so that
            sums that round may be drawn.
        configurable: the harness sets the keys of ``spec/strategies.md`` in the configuration; else it is handed over
            as the user gave it.
    """

    sharding: Sharding = "any"
    replicas: int | None = None
    reduce: tuple[Reduce, ...] = ("bf16",)
    compute: tuple[Reduce, ...] = ("bf16",)
    dtypes: tuple[Reduce, ...] = ("fp32",)
    offload: bool = False
    unused: bool = False
    tied: bool = False
    plain: bool = False
    unequal_start: bool = False
    deferred: bool = False
    flush: bool = False
    dedicated: bool = False
    rounds: bool = False
    configurable: bool = False


DECLARABLE = ("unused", "tied", "plain", "unequal_start", "deferred", "flush", "dedicated")
"""What a class of one's own may name in ``verify_extensions``."""
