"""The process group of a simulated world, as ``torch.distributed`` calls it: from Python, and from its own C++.

Each method describes one collective, hands it to the group's channel, and returns a work to wait for. Names and
arguments are those of ``torch.distributed.ProcessGroup``; where torch has renamed a method both names are there.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from harness.sim import collectives
from harness.sim.collectives import Request
from harness.sim.meeting import Channel, Message
from harness.sim.refusal import HINT, Refused
from harness.sim.summation import supported
from harness.sim.work import Pending, Sent, SimWork, pieces

_ProcessGroup: Any = dist.ProcessGroup  # as torch declares it, its methods take and return less than these
_BACKEND = "gloo"
_Timeout = datetime.timedelta | None


class SimGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's end of a group.

    Attributes:
        channel: What the ranks of the group share.
        pending: The buffers of asynchronous collectives.
    """

    def __init__(self, channel: Channel, index: int, store: Store, pending: Pending) -> None:
        super().__init__(index, len(channel.ranks))
        self.channel = channel
        self.pending = pending
        self.index = index
        self._store = store
        self._description = "default_pg" if channel.is_default else "undefined"

    # What torch asks a group about

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """For torch's C++, which would look for a real gloo behind that name (DDP's logger does)."""
        return "sim"

    def name(self) -> str:
        """As gloo's."""
        return _BACKEND

    @property
    def group_name(self) -> str:
        """The same on all ranks."""
        return self.channel.name

    @property
    def group_desc(self) -> str:
        """As torch sets it."""
        return self._description

    def _set_group_desc(self, description: str | None) -> None:
        self._description = description or "undefined"

    def _set_group_name(self, name: str) -> None:
        pass

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> SimGroup:
        return self

    def _get_backend_name(self) -> str:
        return _BACKEND

    @property
    def supports_splitting(self) -> bool:
        """As gloo."""
        return False

    def get_group_store(self) -> Store:
        """Shared by all ranks."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.channel.ordinal(self.index) - 1

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Nothing times out here."""

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        pass

    def shutdown(self) -> None:
        """Nothing is to be ended."""

    def abort(self) -> None:
        """Nothing is to be ended."""

    def _start_coalescing(self, device: torch.device) -> None:
        raise RuntimeError(f"Backend {_BACKEND} does not implement startCoalescing")

    def __repr__(self) -> str:
        return f"SimGroup({self.channel.title}, rank {self.index} of {len(self.channel.ranks)})"

    # Collectives

    def _launch(self, request: Request) -> SimWork:
        self._begin(request.kind)
        if any(tensor.layout != torch.strided for tensor in (*request.inputs, *request.outputs)):
            raise Refused(f"{request.kind} of a sparse tensor: a simulated world takes dense tensors only; {HINT}")
        problem = self._root_problem(request) or collectives.refusal(request) or self._reduction_problem(request)
        if problem is not None:
            raise RuntimeError(problem)
        number = self.channel.ordinal(self.index)
        buffers = self.pending.launch(
            lambda: f"{_ordinal(number)} collective{self._where()}, {request.text()}",
            request.inputs,
            request.outputs,
            asynchronous=request.asynchronous,
            in_place=request.in_place or request.kind == "reduce_scatter",
        )
        meeting = self.channel.call(self.index, request, buffers)
        return SimWork(self, meeting, request, buffers)

    def _begin(self, what: str) -> None:
        rank = self.channel.scheduler.begin(what)
        owner = self.channel.ranks[self.index]
        if rank != owner:
            raise Refused(
                f"{what}: rank {rank} uses a group object of rank {owner}, on {self.channel.title}: a module that all "
                "ranks of a simulated world share can keep one rank's only; keep it in the class, or verify this class "
                "with --backend gloo"
            )

    def _where(self) -> str:
        return "" if self.channel.is_default else f" on {self.channel.title}"

    def _root_problem(self, request: Request) -> str | None:
        if request.root is None or 0 <= request.root < self.size():
            return None
        return f"{request.kind}: invalid root {request.root}, expected 0 to {self.size() - 1}"

    def _reduction_problem(self, request: Request) -> str | None:
        if request.op is None:
            return None
        return next((problem for tensor in request.inputs if (problem := supported(request.op, tensor.dtype))), None)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: _Timeout = None) -> SimWork:  # noqa: ANN401
        """In place."""
        own = _listed(tensors)
        return self._launch(
            Request("all_reduce", own, own, op=_op(opts), asynchronous=_asynchronous(opts), in_place=True)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimWork:  # noqa: ANN401
        """In place, all tensors as one."""
        own = list(tensors)
        return self._launch(
            Request("all_reduce_coalesced", own, own, op=_op(opts), asynchronous=_asynchronous(opts), in_place=True)
        )

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> SimWork:  # noqa: ANN401
        """In place on the root; the others' tensors mean nothing afterwards."""
        own = _listed(tensors)
        root, op = (opts.rootRank, opts.reduceOp) if hasattr(opts, "rootRank") else (opts or 0, _first(rest, named))
        return self._launch(
            Request("reduce", own, own, op=op, root=root, asynchronous=_asynchronous(opts), in_place=True)
        )

    def broadcast(self, tensors: Any, opts: Any = None, timeout: _Timeout = None) -> SimWork:  # noqa: ANN401
        """Into the others' tensors."""
        own = _listed(tensors)
        root = opts.rootRank if hasattr(opts, "rootRank") else opts or 0
        sends = root == self.index
        request = Request(
            "broadcast", own if sends else [], [] if sends else own, root=root, asynchronous=_asynchronous(opts)
        )
        return self._launch(request)

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SimWork:  # noqa: ANN401
        """Into one tensor for each rank."""
        own = _listed(input_tensors)[0]
        outputs = list(output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors)
        self._require_outputs("all_gather", outputs, own)
        return self._launch(Request("all_gather", [own], outputs, asynchronous=_asynchronous(opts)))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimWork:  # noqa: ANN401
        """Into one tensor, end to end."""
        self._require_outputs("all_gather", pieces(output, self.size()), source)
        return self._launch(Request("all_gather", [source], [output], asynchronous=_asynchronous(opts)))

    def allgather_coalesced(
        self,
        output_lists: list[list[Tensor]],
        input_list: list[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> SimWork:
        """Of several tensors: a list for each rank."""
        outputs = [tensor for of_rank in output_lists for tensor in of_rank]
        if len(outputs) != len(input_list) * self.size():
            raise ValueError(f"all_gather_coalesced: expected {self.size()} lists of {len(input_list)} output tensors")
        return self._launch(
            Request("all_gather_coalesced", list(input_list), outputs, asynchronous=_asynchronous(opts))
        )

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> SimWork:
        """Of several tensors, each into one of its own."""
        for output, own in zip(outputs, inputs, strict=True):
            self._require_numel("all_gather", output, own.numel() * self.size())
        return self._launch(
            Request("all_gather_single_coalesced", list(inputs), list(outputs), asynchronous=_asynchronous(opts))
        )

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> SimWork:  # noqa: ANN401
        """Of one tensor for each rank."""
        output = _listed(output_tensors)[0]
        own = list(input_tensors[0] if isinstance(input_tensors[0], (list, tuple)) else input_tensors)
        if len(own) != self.size():
            raise ValueError(f"reduce_scatter: expected {self.size()} input tensors, one a rank, got {len(own)}")
        self._require_numel("reduce_scatter", output, own[self.index].numel())
        return self._launch(
            Request("reduce_scatter_list", own, [output], op=_op(opts), asynchronous=_asynchronous(opts))
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> SimWork:  # noqa: ANN401
        """Of one tensor, end to end."""
        if output.dim() and source.dim() and output.shape[0] * self.size() != source.shape[0]:
            raise ValueError(
                f"reduce_scatter: expected an input of {output.shape[0] * self.size()} rows ({self.size()} times the "
                f"output's {output.shape[0]}), got {source.shape[0]}"
            )
        self._require_numel("reduce_scatter", source, output.numel() * self.size())
        return self._launch(
            Request("reduce_scatter", [source], [output], op=_op(opts), asynchronous=_asynchronous(opts))
        )

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> SimWork:
        """Of several tensors, each by itself."""
        for output, own in zip(outputs, inputs, strict=True):
            self._require_numel("reduce_scatter", own, output.numel() * self.size())
        return self._launch(
            Request(
                "reduce_scatter_coalesced", list(inputs), list(outputs), op=_op(opts), asynchronous=_asynchronous(opts)
            )
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,  # noqa: ANN401
    ) -> SimWork:
        """By rows, evenly or as the splits say."""
        splits = self._splits(source, input_splits, "input"), self._splits(output, output_splits, "output")
        return self._launch(
            Request("all_to_all_single", [source], [output], splits=splits, asynchronous=_asynchronous(opts))
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimWork:  # noqa: ANN401
        """One tensor for, and from, each rank."""
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(
                f"all_to_all: expected {self.size()} tensors each way, got {len(inputs)} inputs, {len(outputs)} outputs"
            )
        for tensor in (*inputs, *outputs):
            if tensor.shape != inputs[0].shape or tensor.dtype != inputs[0].dtype:
                raise ValueError(
                    "all_to_all: gloo takes tensors of one type and shape only, here "
                    f"{inputs[0].dtype} of shape {tuple(inputs[0].shape)}, got {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}; all_to_all_single takes uneven splits"
                )
        splits = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        return self._launch(
            Request("all_to_all", list(inputs), list(outputs), splits=splits, asynchronous=_asynchronous(opts))
        )

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **named: Any) -> SimWork:  # noqa: ANN401
        """To the root."""
        own = _listed(input_tensors)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else opts or 0
        outputs: list[Tensor] = []
        if root == self.index:
            outputs = list(output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors)
            self._require_outputs("gather", outputs, own)
        return self._launch(Request("gather", [own], outputs, root=root, asynchronous=_asynchronous(opts)))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, **named: Any) -> SimWork:  # noqa: ANN401
        """From the root."""
        output = _listed(output_tensors)[0]
        root = opts.rootRank if hasattr(opts, "rootRank") else opts or 0
        inputs: list[Tensor] = []
        if root == self.index:
            inputs = list(input_tensors[0] if isinstance(input_tensors[0], (list, tuple)) else input_tensors)
            self._require_outputs("scatter", inputs, output)
        return self._launch(Request("scatter", inputs, [output], root=root, asynchronous=_asynchronous(opts)))

    def barrier(self, opts: Any = None, timeout: _Timeout = None) -> SimWork:  # noqa: ANN401
        """All ranks have come."""
        return self._launch(Request("barrier", asynchronous=_asynchronous(opts)))

    def monitored_barrier(self, timeout: _Timeout = None, wait_all_ranks: bool = False) -> None:
        """All ranks have come; nothing times out here."""
        self._launch(Request("barrier")).wait()

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Sent:  # noqa: ANN401
        """To one rank of the group."""
        return self._message(_listed(tensors)[0], destination, tag, sends=True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Sent:  # noqa: ANN401
        """From one rank of the group."""
        return self._message(_listed(tensors)[0], source, tag, sends=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Sent:  # noqa: ANN401
        """From whichever rank sends first."""
        return self._message(_listed(tensors)[0], None, tag, sends=False)

    def _message(self, tensor: Tensor, peer: int | None, tag: int, *, sends: bool) -> Sent:
        self._begin("send" if sends else "recv")
        if peer is not None and not 0 <= peer < self.size():
            raise RuntimeError(
                f"{'send to' if sends else 'recv from'} rank {peer} of a group of {self.size()}, expected 0 to "
                f"{self.size() - 1}"
            )
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"{'send' if sends else 'recv'} of a tensor with strides {tensor.stride()}: gloo would take the first "
                "elements of its storage instead; communicate tensor.contiguous()"
            )
        message = Message(self.channel, tensor, peer, tag, sends=sends)
        # What torch's send() and recv() call is the same as what isend() and irecv() do.
        inputs, outputs = ([tensor], []) if sends else ([], [tensor])
        buffers = self.pending.launch(message.describe, inputs, outputs, asynchronous=True, in_place=False)
        self.channel.message(self.index, message)
        return Sent(self, message, buffers)

    # Earlier and other names of the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, rows: Sequence[int] | None, which: str) -> list[int]:
        """How many elements go to, or come from, each rank."""
        num_rows = tensor.shape[0] if tensor.dim() else 0
        size = self.size()
        if not rows:
            if num_rows % size:
                raise ValueError(f"all_to_all_single: {num_rows} {which} rows do not divide evenly over {size} ranks")
            rows = [num_rows // size] * size
        if len(rows) != size or sum(rows) != num_rows:
            raise ValueError(
                f"all_to_all_single: expected {size} {which} splits that add up to {num_rows} rows, got {list(rows)}"
            )
        length = tensor.numel() // num_rows if num_rows else 0
        return [count * length for count in rows]

    def _require_outputs(self, kind: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{kind}: expected {self.size()} tensors, one a rank, got {len(tensors)}")
        for number, tensor in enumerate(tensors):
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise ValueError(
                    f"{kind}: expected {like.dtype} of shape {tuple(like.shape)} for rank {number}, got {tensor.dtype} "
                    f"of shape {tuple(tensor.shape)}"
                )

    def _require_numel(self, kind: str, tensor: Tensor, numel: int) -> None:
        if tensor.numel() != numel:
            raise ValueError(f"{kind}: expected a tensor of {numel} elements, got {tensor.numel()}")


def _listed(tensors: Any) -> list[Tensor]:  # noqa: ANN401 (torch's methods take a tensor or a list)
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _op(opts: Any) -> Any:  # noqa: ANN401 (options, or the operation itself)
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _asynchronous(opts: Any) -> bool:  # noqa: ANN401
    return bool(getattr(opts, "asyncOp", False))


def _first(rest: Sequence[Any], named: dict[str, Any]) -> Any:  # noqa: ANN401
    return rest[0] if rest else named.get("op", dist.ReduceOp.SUM)


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"
