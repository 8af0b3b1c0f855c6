"""How a :class:`~zero2core.muon.sharding.MuonShardingOptimizer` shards and communicates."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from zero2core.muon.ownership import DEFAULT_BUFFER_MB, OwnerRule

__all__ = ["DEFAULT_COLOR", "MuonShardingConfig", "color_key"]

DEFAULT_COLOR = -1
"""The colour of parameters of the default group; absent, None and -1 all mean it."""


@dataclass(frozen=True)
class MuonShardingConfig:
    """Settings; unknown values are refused.

    Attributes:
        comm_buffer_size_mb: size of a fused buffer in MiB of fp32 gradient; ``<= 0``: whole matrices are not fused, and
            element-wise buffers, and the ``numel`` rule, take 256.
        owner_rule: ``"newton_schulz"`` balances the cost of Newton-Schulz; ``"numel"`` is the original rule, by
            elements, which leaves ranks idle.
        owner_cap: of the ``newton_schulz`` rule: no rank holds more than so many times the mean elements, unless one
            tensor alone does, or every rank would.
        use_reduce_avg: average in the collective where the backend can, but with ``comm_overlap`` (which may have to
            add to a sum what comes late); else sum, then divide once.
        comm_overlap: start a buffer's collective from autograd's hooks as soon as its last gradient is there. Same bits
            as without, except where a step has more backward passes than it and all before were to have: those beyond
            are summed by themselves, which rounds in another order.
        accumulate_steps: backward passes of a step, for ``comm_overlap``; ``no_sync()`` says it explicitly.
        release_gradients: free the gradients' storage after each step.
        fuse_optimizer_states: one storage for all moments and masters of a rank.
        two_hop: reduce inside each node, then across nodes; weights the other way round.
        local_world_size: ranks of a node, for ``two_hop``; None: the environment's LOCAL_WORLD_SIZE.
        skip_missing: a parameter without gradient on any rank is skipped; else it counts as a gradient of zeros.
        colors: parameter name -> (key, process group) it belongs to.
        color_divisors: key -> what the sum of gradients is divided by, in place of the size of the group.
        tensor_parallel_size, pipeline_overlap: refused (``NotImplementedError``) unless 1 and False.
    """

    comm_buffer_size_mb: float = DEFAULT_BUFFER_MB
    owner_rule: OwnerRule = "newton_schulz"
    owner_cap: float = 1.3
    use_reduce_avg: bool = True
    comm_overlap: bool = False
    accumulate_steps: int = 1
    release_gradients: bool = False
    fuse_optimizer_states: bool = False
    two_hop: bool = False
    local_world_size: int | None = None
    skip_missing: bool = False
    colors: Mapping[str, tuple[Hashable, dist.ProcessGroup | None] | None] = field(default_factory=dict)
    color_divisors: Mapping[Hashable, float] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    pipeline_overlap: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError``, ``TypeError`` or ``NotImplementedError`` for what cannot be."""
        if self.owner_rule not in ("newton_schulz", "numel"):
            raise ValueError(f"owner_rule={self.owner_rule!r}: expected 'newton_schulz' or 'numel'")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected True or False")
        if not _is_number(self.comm_buffer_size_mb):
            raise ValueError(f"comm_buffer_size_mb={self.comm_buffer_size_mb!r}: expected a finite number of MiB")
        if not _is_number(self.owner_cap) or self.owner_cap < 1:
            raise ValueError(f"owner_cap={self.owner_cap!r}: expected at least 1 (times the mean elements of a rank)")
        for name in ("accumulate_steps", "local_world_size"):
            count = getattr(self, name)
            if count is None and name == "local_world_size":
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name}={count!r}: expected a whole number from 1 up")
        if not isinstance(self.colors, Mapping) or not isinstance(self.color_divisors, Mapping):
            raise TypeError("colors and color_divisors must be mappings: name -> (key, group), key -> divisor")
        for name, entry in self.colors.items():
            if not isinstance(name, str) or (entry is not None and not _is_color(entry)):
                raise TypeError(f"colors[{name!r}]={entry!r}: expected a parameter's name -> (key, process group)")
        for key, divisor in self.color_divisors.items():
            if not _is_number(divisor) or divisor <= 0:
                raise ValueError(f"color_divisors[{key!r}]={divisor!r}: expected a positive number")
        if self.tensor_parallel_size != 1:
            raise NotImplementedError(
                f"tensor_parallel_size={self.tensor_parallel_size}: a matrix must be whole on every rank; shard it "
                "over tensor-parallel ranks only where it is gathered again before this optimizer sees it"
            )
        if self.pipeline_overlap:
            raise NotImplementedError("pipeline_overlap: communication cannot start inside a pipeline schedule")

    def color_of(self, name: str) -> Hashable:
        """The key of a parameter's colour."""
        entry = self.colors.get(name)
        return DEFAULT_COLOR if entry is None else color_key(entry[0])

    @property
    def whole_buffer_mb(self) -> float:
        """MiB of a buffer of whole matrices; 0: one buffer for each."""
        return max(self.comm_buffer_size_mb, 0.0)

    @property
    def flat_buffer_mb(self) -> float:
        """MiB of a buffer of the element-wise set."""
        return self.comm_buffer_size_mb if self.comm_buffer_size_mb > 0 else DEFAULT_BUFFER_MB


_SWITCHES = (
    "use_reduce_avg",
    "comm_overlap",
    "release_gradients",
    "fuse_optimizer_states",
    "two_hop",
    "skip_missing",
    "pipeline_overlap",
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_color(entry: object) -> bool:
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], Hashable)):
        return False
    key, group = entry
    if key != key:  # nan: no parameter would be found to have it
        return False
    return group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER


def color_key(key: Hashable) -> Hashable:
    """A colour's key, with all names of the default one made the same."""
    return DEFAULT_COLOR if key is None else key
