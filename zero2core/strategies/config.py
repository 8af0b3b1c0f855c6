"""The configuration of a distribution strategy: every key has one meaning, and what it cannot mean is refused."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

import torch
from torch.amp.grad_scaler import GradScaler  # torch 2.11 does not export it from torch.amp for type checkers

__all__ = ["ReduceDtype", "ShardingStrategy", "StrategyConfig"]

ShardingStrategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "_hybrid_shard_zero2"]
ReduceDtype = Literal["fp32", "bf16"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "fsdp_sharding_strategy": get_args(ShardingStrategy),
    "fsdp_reduce_dtype": get_args(ReduceDtype),
}


@dataclass(frozen=True)
class StrategyConfig:
    """What a strategy does; one field for each key. A value of another type or range is a ``ValueError``.

    Attributes:
        use_fsdp: FSDP2, else DDP.
        fsdp_sharding_strategy: ``full_shard``: one-dimensional mesh, parameters are resharded after forward;
            ``shard_grad_op``: the same mesh, not resharded; ``hybrid_shard`` and ``_hybrid_shard_zero2``: the same two
            on a mesh of replicas and shards.
        use_gradient_checkpointing: the model's ``gradient_checkpointing_enable()`` is called before wrapping.
        fsdp_hsdp_replicate_size: number of replicas of a hybrid mesh; 0: one for each node, see
            :func:`zero2core.strategies.mesh.mesh_shape`. Without effect where nothing is hybrid.
        fsdp_cpu_offload: sharded parameters, gradients and the optimizer's state lie on the CPU.
        use_mixed_precision: FSDP2 computes in 16 bits; else in the dtype of the parameters.
        bf16: the 16 bits are bf16; else fp16, which needs ``grad_scaler``.
        grad_scaler: the ``torch.amp.GradScaler`` by which the trainer scales its loss, where it computes in fp16.
        fsdp_reduce_dtype: FSDP2 adds gradients up in this dtype, over ranks and over parts that are not reduced.
        reshard_after_backward: False: parameters stay whole between the parts of one ``no_sync``, so that the next
            forward gathers nothing. A backward that reduces gradients always reshards, lest the step changes weights
            that the next forward does not see.
        unused_parameters: FSDP2: ranks may differ in which parameters of a unit they use.
        cast_forward_inputs: FSDP2 casts floating-point inputs to the 16 bits, too.
        find_unused_parameters, broadcast_buffers: DDP's own.
        bucket_cap_mb: DDP's, in MiB; a fraction is allowed.
    """

    use_fsdp: bool = False
    fsdp_sharding_strategy: ShardingStrategy = "full_shard"
    use_gradient_checkpointing: bool = False
    fsdp_hsdp_replicate_size: int = 0
    fsdp_cpu_offload: bool = False
    use_mixed_precision: bool = True
    bf16: bool = True
    grad_scaler: GradScaler | None = field(default=None, repr=False)  # another object on each rank
    fsdp_reduce_dtype: ReduceDtype = "fp32"
    reshard_after_backward: bool = True
    unused_parameters: bool = False
    cast_forward_inputs: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25

    def __post_init__(self) -> None:
        for key in fields(self):
            value = getattr(self, key.name)
            if key.type == "bool" and type(value) is not bool:
                raise ValueError(f"{key.name}={value!r}: must be True or False")
            if key.name in _CHOICES and value not in _CHOICES[key.name]:
                raise ValueError(_unknown(f"{key.name}={value!r}", value, _CHOICES[key.name], "values"))
        replicas = self.fsdp_hsdp_replicate_size
        if type(replicas) is not int or replicas < 0:
            raise ValueError(
                f"fsdp_hsdp_replicate_size={replicas!r}: must be a number of replicas, or 0 for one for each node"
            )
        cap = self.bucket_cap_mb
        if type(cap) not in (int, float) or not (0 < cap < math.inf):
            raise ValueError(f"bucket_cap_mb={cap!r}: must be a positive number of MiB")
        if self.grad_scaler is not None and not isinstance(self.grad_scaler, GradScaler):
            raise ValueError(f"grad_scaler={self.grad_scaler!r}: must be a torch.amp.GradScaler, or None")
        if self.use_mixed_precision and not self.bf16 and self.grad_scaler is None:
            raise ValueError(
                "bf16=False computes in fp16, whose small gradients vanish unless the loss is scaled: give grad_scaler="
                "torch.amp.GradScaler(...) and scale the loss by it, or use bf16=True or use_mixed_precision=False"
            )

    @classmethod
    def of(cls, config: StrategyConfig | Mapping[str, Any]) -> StrategyConfig:
        """A validated copy of ``config``; keys that a mapping lacks have their defaults.

        Raises:
            ValueError: an unknown key or value, with the valid ones; values that contradict each other.
        """
        if isinstance(config, StrategyConfig):
            return replace(config)
        if not isinstance(config, Mapping):
            raise ValueError(f"the configuration is a {type(config).__name__}: must be a mapping or a StrategyConfig")
        valid = tuple(key.name for key in fields(cls))
        for key in config:
            if key not in valid:
                raise ValueError(_unknown(f"unknown key {key!r}", key, valid, "keys"))
        return cls(**cast("dict[str, Any]", dict(config)))

    @property
    def hybrid(self) -> bool:
        """Whether the mesh has replicas of shards."""
        return self.fsdp_sharding_strategy in ("hybrid_shard", "_hybrid_shard_zero2")

    @property
    def reshard_after_forward(self) -> bool:
        """Whether parameters are resharded after a forward, to be gathered again by its backward."""
        return self.fsdp_sharding_strategy in ("full_shard", "hybrid_shard")

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What FSDP2 casts parameters to for a forward; None: nothing."""
        if not self.use_mixed_precision:
            return None
        return torch.bfloat16 if self.bf16 else torch.float16

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which FSDP2 adds gradients up."""
        return torch.float32 if self.fsdp_reduce_dtype == "fp32" else torch.bfloat16


def _unknown(what: str, given: object, valid: tuple[str, ...], kind: str) -> str:
    near = difflib.get_close_matches(str(given), valid, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what}: valid {kind} are {', '.join(map(repr, valid))}{meant}"
