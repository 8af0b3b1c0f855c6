"""Saving all ranks' state for :mod:`torch.distributed.checkpoint`, and loading it into another world or another plan.

A checkpoint holds each parameter's state as one tensor, of which every rank writes and reads only its own part: whole
tensors of matrices, in their shape, and flat ranges of the rest, ``[numel]``, whose pieces need not be equal. Nobody
ever holds all of it: saving copies nothing, loading takes once more the memory of this rank's own state.

[Note: keys]
``index`` says what there is: parameters, aliases, settings; all ranks have the same, one writes it. Beside it stand,
for each parameter that has elements, ``state.NAME.KIND`` (``master``, ``momentum``, ``exp_avg``, ``exp_avg_sq``) and
``state.NAME.scalars``, written by whoever owns some of it. Where the groups of a colour are several, their parameters
have values of their own in each: ``ranks 0,2.NAME.KIND``.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from zero2core.agreement import gather_texts
from zero2core.muon.state import load_into, require_groups, saved_settings

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from zero2core.muon.sharding import MuonShardingOptimizer

__all__ = ["Part", "load_sharded_state", "sharded_state"]

_VERSION = 1
_INDEX = "index"
_INDEX_KEYS = {"version", "parameters", "aliases", "groups", "param_groups", "grad_clip"}


class Part(Tensor):
    """This rank's part of a tensor that a checkpoint holds whole; it has the shape of the whole, and its own memory.

    torch.distributed.checkpoint finds in it which box of the whole this rank writes or reads. Nothing can be computed
    with it.

    Attributes:
        part: the memory of this rank's box, whose shape it has.
        offsets: where the box begins, in each dimension.
        filled: it is read into; a part that is only written refuses to be.
    """

    part: Tensor
    offsets: tuple[int, ...]
    filled: bool

    def __new__(cls, shape: tuple[int, ...], part: Tensor, offsets: tuple[int, ...], *, filled: bool) -> Self:
        """A part of a tensor of ``shape``."""
        make: Callable[..., Self] = Tensor._make_wrapper_subclass
        self = make(cls, shape, dtype=part.dtype, device=part.device)
        self.part, self.offsets, self.filled = part, offsets, filled
        return self

    def __init__(self, *_: object, **__: object) -> None:
        """See ``__new__``."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What is written."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        (chunk,) = self._chunks()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.part), self.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What is read."""
        if not self.filled:
            raise RuntimeError(
                "what sharded_state_dict() gave is to be saved; load with load_sharded_state_dict(), which also reads "
                "step counters and settings"
            )
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.offsets), self.part.size())]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory that is written from, or read into."""
        return self.part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is declared without cls
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Part:
        """An empty one of the same shape is all that an asynchronous save asks for, before it copies the attributes."""
        if func is torch.ops.aten.new_empty.default and isinstance(args[0], Part):
            one = args[0]
            return Part(tuple(one.shape), one.part, one.offsets, filled=one.filled)
        raise NotImplementedError(f"{func} of one rank's part of a tensor: it is there to be saved or loaded")

    def __repr__(self) -> str:  # type: ignore[override]
        """Which part of what."""
        return f"Part(shape={tuple(self.shape)}, offsets={self.offsets}, part={tuple(self.part.shape)})"


@dataclass(frozen=True)
class _Model:
    """What every rank knows alike of the parameters.

    ``parameters``: name -> (shape, dtype, use_muon). ``aliases``: other names of tied weights -> the optimizer's.
    ``groups``: name -> ranks of each of the groups of its colour, where these are several.
    """

    parameters: dict[str, tuple[tuple[int, ...], torch.dtype, bool]]
    aliases: dict[str, str]
    groups: dict[str, list[list[int]]]


def sharded_state(optimizer: MuonShardingOptimizer, model_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """See :meth:`MuonShardingOptimizer.sharded_state_dict`. Tensors are the optimizer's own, no copies."""
    model = _model(optimizer, model_state_dict)
    clip = None if optimizer.inner.grad_clip is None else dict(optimizer.inner.grad_clip.state_dict())
    norms: Mapping[str, Any] | None = None if clip is None else clip.pop("norms", None)
    index = {
        "version": _VERSION,
        "parameters": model.parameters,
        "aliases": model.aliases,
        "groups": model.groups,
        "param_groups": saved_settings(optimizer.inner.param_groups),
        "grad_clip": None if clip is None else {"state": clip, "norms": norms is not None},
    }
    state: dict[str, Any] = {_INDEX: _packed(index)}
    keys = _keys(optimizer, model)
    for name, parts in _parts(optimizer).items():
        state.update({f"{keys[name]}.{kind}": part for kind, part in parts.items()})
        step = optimizer.inner.state[optimizer.inner.named[name]].get("step")
        state[f"{keys[name]}.scalars"] = _packed({"step": step, "norm": (norms or {}).get(name)})
    return state


@torch.no_grad()
def load_sharded_state(
    optimizer: MuonShardingOptimizer, model_state_dict: Mapping[str, Any], read: Callable[[dict[str, Any]], object]
) -> None:
    """See :meth:`MuonShardingOptimizer.load_sharded_state_dict`."""
    model = _model(optimizer, model_state_dict)
    for name, param in optimizer.inner.named.items():
        if param.numel() and _memory(model_state_dict[name]) != _memory(param):
            raise ValueError(
                f"model_state_dict holds another {name} than the model has now: weights loaded into it would not reach "
                "the model. Call model.state_dict() after the optimizer is constructed, which moves parameters"
            )
    first: dict[str, Any] = {_INDEX: None}
    _read(read, first)
    index = _checked_index(first[_INDEX])
    names = _saved_names(model, index)
    _require_same(model, index, names)
    require_groups(optimizer.inner.param_groups, index["param_groups"])
    clip, saved_clip = optimizer.inner.grad_clip, index["grad_clip"]
    if (clip is None) != (saved_clip is None):
        has, had = ("no", "a") if clip is None else ("a", "no")
        raise ValueError(f"this optimizer has {has} clip, the saved one had {had} one: construct it alike")

    staged = _parts(optimizer, empty=True)
    keys = _keys(optimizer, model, names)
    wanted: dict[str, Any] = {f"{key}.scalars": None for key in keys.values()}
    for name, parts in staged.items():
        wanted.update({f"{keys[name]}.{kind}": part for kind, part in parts.items()})
    _read(read, wanted)
    scalars = {name: _unpacked(wanted[f"{key}.scalars"]) for name, key in keys.items()}

    # From here on nothing can fail, but for a clip that refuses what is another one's.
    if clip is not None:
        norms = {name: one["norm"] for name, one in scalars.items() if one["norm"] is not None}
        clip.load_state_dict({**saved_clip["state"], **({"norms": norms} if saved_clip["norms"] else {})})
    for name, parts in staged.items():
        values: dict[str, Any] = {kind: part.part for kind, part in parts.items()}
        if scalars[name]["step"] is not None:
            values["step"] = scalars[name]["step"]
        load_into(optimizer.inner.state[optimizer.inner.named[name]], values)
    for group, new in zip(optimizer.inner.param_groups, index["param_groups"], strict=True):
        group.update(copy.deepcopy(new))


def _read(read: Callable[[dict[str, Any]], object], state: dict[str, Any]) -> None:
    """Call ``read``; what torch raises on all ranks, with all their tracebacks, is told in a line."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        read(state)
    except CheckpointException as error:
        told = {f"{type(one).__name__}: {one}".removesuffix(": "): rank for rank, (one, _) in error.failures.items()}
        problems = "; ".join(f"rank {rank}: {text}" for text, rank in told.items())
        raise RuntimeError(
            f"the state of the optimizer cannot be read ({problems}): is it where it was saved, are all files there, "
            "and whole? The optimizer is as it was"
        ) from error


def _parts(optimizer: MuonShardingOptimizer, *, empty: bool = False) -> dict[str, dict[str, Part]]:
    """By parameter and kind of state what this rank holds, or as much memory to be filled."""
    found: dict[str, dict[str, Part]] = {}
    for shard in optimizer.local_shards():
        param = optimizer.inner.named[shard.name]
        whole = optimizer.inner.info[shard.name].use_muon
        shape = tuple(param.shape) if whole else (param.numel(),)
        offsets = (0,) * param.dim() if whole else (shard.start,)
        found[shard.name] = {
            kind: Part(shape, torch.empty_like(value) if empty else value, offsets, filled=empty)
            for kind, value in optimizer.inner.state[param].items()
            if isinstance(value, Tensor)
        }
    return found


def _keys(optimizer: MuonShardingOptimizer, model: _Model, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the keys of each parameter of this rank's colours begin with; ``names``: under which it was saved."""
    found = {}
    for color in optimizer.plan.colors:
        group = f"ranks {','.join(map(str, color.ranks))}"
        for name in (slot.name for buffer in color.buffers for slot in buffer.slots):
            place = group if name in model.groups else "state"
            found[name] = f"{place}.{name if names is None else names[name]}"
    return found


# --- what there is ----------------------------------------------------------------------------------------------------


def _model(optimizer: MuonShardingOptimizer, model_state_dict: Mapping[str, Any]) -> _Model:
    """Collective where there are colours."""
    named, info = optimizer.inner.named, optimizer.inner.info
    parameters = {name: (tuple(param.shape), param.dtype, info[name].use_muon) for name, param in named.items()}
    return _Model(parameters, _aliases(named, model_state_dict), _several_groups(optimizer))


def _aliases(named: Mapping[str, nn.Parameter], model_state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Further names of weights in the model's state; raises ``ValueError`` where the two do not fit."""
    known: dict[tuple[object, ...], str] = {}
    for name, param in named.items():
        if name not in model_state_dict:
            raise ValueError(
                f"model_state_dict lacks {name}, which the optimizer trains: pass the state of the module whose "
                "named_parameters() it was given"
            )
        given = model_state_dict[name]
        if given.shape != param.shape or given.dtype != param.dtype:
            raise ValueError(
                f"model_state_dict has {name} as {given.dtype} {tuple(given.shape)}, the optimizer trains "
                f"{param.dtype} {tuple(param.shape)}"
            )
        if param.numel():
            known[_memory(given)] = name
    aliases = {}
    for name, given in model_state_dict.items():
        if name in named or not isinstance(given, Tensor):
            continue
        if given.numel() and _memory(given) in known:
            aliases[name] = known[_memory(given)]
        elif isinstance(given, nn.Parameter) and given.requires_grad:
            raise ValueError(f"model_state_dict has the trainable parameter {name}, which the optimizer does not know")
    return aliases


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """The same for two tensors on the same memory, also where that is freed at the moment."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _several_groups(optimizer: MuonShardingOptimizer) -> dict[str, list[list[int]]]:
    """The groups of each parameter whose colour has several, ranks as the default group counts them."""
    colors = {name: optimizer.config.color_of(name) for name in optimizer.inner.named}
    mine = {repr(color.key): list(color.ranks) for color in optimizer.plan.colors}
    texts = [json.dumps(mine)]
    if optimizer.world > 1 and len(set(colors.values())) > 1:
        device = next(iter(optimizer.inner.named.values())).device
        texts = gather_texts(texts[0], group=optimizer.group, device=device)
    groups: dict[str, set[tuple[int, ...]]] = {}
    for text in texts:
        for key, ranks in json.loads(text).items():
            groups.setdefault(key, set()).add(tuple(ranks))
    found: dict[Hashable, list[list[int]]] = {
        key: [list(ranks) for ranks in sorted(of_one)] for key, of_one in groups.items() if len(of_one) > 1
    }
    return {name: found[repr(key)] for name, key in colors.items() if repr(key) in found}


# --- is it the same model? --------------------------------------------------------------------------------------------


def _checked_index(read: object) -> dict[str, Any]:
    index = _unpacked(read) if isinstance(read, bytes) else read
    if not isinstance(index, dict) or set(index) != _INDEX_KEYS:
        raise ValueError(
            f"the checkpoint's {_INDEX!r} is no index of a MuonShardingOptimizer ({type(read).__name__}): read where "
            "the result of sharded_state_dict() was saved"
        )
    if index["version"] != _VERSION:
        raise ValueError(f"the checkpoint is of version {index['version']!r}, this one reads {_VERSION}")
    return index


def _saved_names(model: _Model, index: Mapping[str, Any]) -> dict[str, str]:
    """Under which name each parameter was saved: its own, or, of tied weights, any of theirs."""
    saved, aliases = index["parameters"], index["aliases"]
    names: dict[str, str] = {}
    for name in model.parameters:
        tied = [other for other, target in model.aliases.items() if target == name]
        found = [aliases.get(other, other) for other in (name, *tied) if other in saved or other in aliases]
        if not found:
            raise ValueError(
                f"the checkpoint has no parameter {name}; it has {', '.join(sorted(saved)[:5])}, ...: it is of another "
                "model, or of other trainable parameters"
            )
        names[name] = found[0]
    unused = sorted(set(saved) - set(names.values()))
    if unused:
        raise ValueError(
            f"the checkpoint has {unused[0]}, which this optimizer does not train: it is of another model, or of other "
            "trainable parameters"
        )
    return names


def _require_same(model: _Model, index: Mapping[str, Any], names: Mapping[str, str]) -> None:
    for name, here in model.parameters.items():
        there = index["parameters"][names[name]]
        if there != here:
            raise ValueError(f"the checkpoint has {name} as {_shown(there)}, this optimizer trains {_shown(here)}")
        groups, saved_groups = model.groups.get(name), index["groups"].get(names[name])
        if groups != saved_groups:
            raise NotImplementedError(
                f"{name} has, in each of several groups of its colour, values of its own: saved by groups "
                f"{saved_groups or 'one'}, here {groups or 'one'} (ranks); such a parameter can be loaded only by the "
                "same groups"
            )


def _shown(parameter: tuple[tuple[int, ...], torch.dtype, bool]) -> str:
    shape, dtype, use_muon = parameter
    return f"{dtype} {shape} with use_muon={use_muon}"


# --- plain values -----------------------------------------------------------------------------------------------------


def _packed(value: object) -> bytes:
    """As bytes, which keep tuples and dtypes, and which a checkpoint takes as one entry."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    packed = buffer.getvalue()
    _unpacked(packed)  # to be told now and not by whoever loads it
    return packed


def _unpacked(packed: bytes) -> Any:  # noqa: ANN401 (whatever was packed)
    return torch.load(io.BytesIO(packed), weights_only=True)
