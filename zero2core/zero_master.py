"""ZeRO-2: master weights, AdamW moments and the reduced gradient, sharded over data-parallel ranks.

[Note: held and spilled gradients]
A step of one part keeps the tensors autograd made: no copy until they are reduced. A step of several parts sums them
in one fp32 vector on the host, in the order the parts come. What is waiting is in exactly one of the two places.

[Note: staging]
Collectives need one contiguous tensor, parameters are many. Two buffers of one fp32 bucket each, allocated at
construction, are used in turn: one is filled, or emptied, while the other is in flight. Both the reduce-scatter and
the all-gather use them. At world 1 nothing travels and there are none.

[Note: all ranks issue the same collectives]
What a rank sends depends on the layout alone, never on what the rank holds: a rank without gradients sends zeros.
:meth:`ZeroMaster.expected_collectives` is the list.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2core import collectives
from zero2core.agreement import AGREEMENT_COLLECTIVES
from zero2core.arguments import parameters_problem, require_place, require_same_parameters
from zero2core.collectives import Collective, Work
from zero2core.errors import GradientStateError, SimulationError
from zero2core.flat import flat_views, read_flat, write_flat
from zero2core.layout import FlatLayout

__all__ = ["BUCKET", "ZeroMaster"]

BUCKET = 2**25
"""Default bucket: elements of one collective, 128 MiB of fp32."""

_NUM_STAGING = 2

_CHUNK = 2**18
"""Elements converted at a time where a whole-tensor conversion would allocate as much as the tensor."""


class ZeroMaster:
    """Sharded fp32 master weights of ``params``; every rank keeps whole compute weights.

    One training step, on every rank::

        loss.backward()
        master.collect(more=False)          # once per part; more=True: another part of this step follows
        master.reduce_scatter()             # sum over ranks into master.master.grad
        norm = master.grad_sq_norm().sqrt() # clip by scaling master.master.grad in place
        optimizer.step()                    # torch.optim.AdamW([master.master])
        master.gather_params()              # the new weights, rounded, on every rank

    All methods but ``collect``, ``discard`` and ``refresh_from_weights`` are collective: all ranks call them in the
    same order. The sum is a sum, not a mean: the caller scales its loss. Weights must start equal on all ranks
    (:func:`~zero2core.broadcast.broadcast_module`).

    Args:
        params: the trainable parameters, on one device, each listed once (tied weights too). Dtypes may differ, any
            strides work, zero-size ones are allowed.
        rank: this process's rank in ``group``.
        world: number of ranks of ``group``. World 1 needs no process group.
        bucket: elements per collective; rounded down to a multiple of ``world``, never below ``world``.
        sim_world: more than 1: lay out, allocate and compute as rank 0 of that many ranks, and call no collective, to
            measure one rank's memory and step time on one device. Gradients are this process's own, and only rank
            0's pieces are updated. ``rank`` and ``world`` must be 0 and 1.
        group: the process group; the default group when None.

    Attributes:
        params: as given.
        world, rank: of the layout: those of the simulation where there is one.
        sim: this is a simulated rank.
        comm: collectives are used.
        master: fp32 parameter of ``shard_len`` elements: this rank's pieces in bucket order, padding zero. Hand it to
            the optimizer.
        grad_buf: fp32, 1D, ``shard_len``: what ``reduce_scatter`` fills; the same tensor at every step.
        held: the waiting gradients as autograd made them, None for each parameter without; None when none are held.
        host: fp32, 1D, ``N``, on the CPU (pinned for CUDA): the sum of a step of several parts; None before the first.
        spills: steps (discarded ones too) that moved gradients to the host so far.
        layout, numel, offsets, N, buckets, shard_len: the layout, see :class:`~zero2core.layout.FlatLayout`.
        device: of the parameters and of everything here but ``host``.

    Raises:
        ValueError: arguments that cannot be used; a parameter is named by its index and shape. When one rank refuses
            its list of parameters or bucket, all others raise too.
        RankMismatchError: on all ranks, when shapes, dtypes or bucket differ between ranks.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        rank: int,
        world: int,
        bucket: int = BUCKET,
        sim_world: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        rank, world, sim_world = operator.index(rank), operator.index(world), operator.index(sim_world)
        bucket = operator.index(bucket)
        require_place(rank, world, sim_world, group)
        self.sim = sim_world > 1
        self.comm = world > 1
        self._group = group

        problem = parameters_problem(params, bucket)
        if self.comm:
            require_same_parameters(params, bucket, problem, group)
        if problem:
            raise ValueError(problem)

        self.params = params
        self.rank = rank
        self.world = sim_world if self.sim else world
        self.layout = FlatLayout(tuple(param.numel() for param in params), self.world, bucket)
        self.numel = self.layout.numel
        self.offsets = self.layout.offsets
        self.N = self.layout.N
        self.buckets = self.layout.buckets
        self.shard_len = self.layout.shard_len
        self.device = params[0].device

        self.held: list[Tensor | None] | None = None
        self.host: Tensor | None = None
        self.spills = 0
        self._on_host = False  # gradients of this step are waiting in `host`
        self._collected = False  # `collect` was called since the last reduction or discard
        self._host_read: torch.cuda.Event | None = None  # the last queued copy out of `host` is done

        self._num_owned = self.layout.num_owned(rank)
        self._wire_dtypes = tuple(self._wire_dtype(bucket.start, bucket.end) for bucket in self.buckets)
        self.master = nn.Parameter(torch.zeros(self.shard_len, dtype=torch.float32, device=self.device))
        self.grad_buf = torch.zeros(self.shard_len, dtype=torch.float32, device=self.device)
        self._staging = tuple(
            torch.empty(self.buckets[0].padded, dtype=torch.float32, device=self.device)
            for _ in range(_NUM_STAGING if self.world > 1 else 0)
        )
        self.refresh_from_weights()

    # Gradients

    @property
    def has_grad(self) -> bool:
        """A gradient is waiting on this rank, on device or host.

        Local: ranks may differ, so it must never decide whether a rank takes part in a collective.
        """
        return self.held is not None or self._on_host

    def has_grad_anywhere(self) -> bool:
        """A gradient is waiting on some rank; the same answer on every rank. Collective: one int32 all-reduce."""
        if not self.comm:
            return self.has_grad
        flag = torch.tensor([int(self.has_grad)], dtype=torch.int32, device=self.device)
        collectives.all_reduce_max(flag, group=self._group)
        return bool(flag.item())

    @torch.no_grad()
    def collect(self, more: bool) -> None:
        """Take every ``.grad`` off the parameters into this step's sum; at least once a step on every rank. Local.

        A part whose gradients are all None changes nothing. See [Note: held and spilled gradients].

        Args:
            more: further parts of this step follow. A part may also follow one that was announced as the last; it
                is added like any other.

        Raises:
            ValueError: a gradient is sparse. Nothing was taken.
            RuntimeError (torch.OutOfMemoryError among them): memory ran out, for the host vector or on the way to it.
                Every ``.grad`` is still there. Where nothing of this step was on the host before, nothing has changed,
                and the call may be made again; otherwise the sum is lost, and as after :meth:`discard` a reduction is
                refused until ``collect`` has been called for the whole step again.
        """
        grads = [param.grad for param in self.params]
        for index, grad in enumerate(grads):
            if grad is not None and grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of params[{index}], shape {tuple(grad.shape)}, has layout {grad.layout}: "
                    "only dense gradients can be summed; use sparse=False"
                )
        if any(grad is not None for grad in grads):
            if more or self.has_grad:
                self._spill(grads)
            else:
                self.held = grads
        self._collected = True
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def reduce_scatter(self) -> None:
        """Sum what is waiting over ranks, in fp32, into ``grad_buf``, which becomes ``master.grad``. Collective.

        Consumes what was waiting, on every rank. A parameter without gradient, and a rank without any, counts as
        zeros. One asynchronous reduce-scatter of fp32 per bucket, in order.

        Raises:
            GradientStateError: ``collect`` was not called since the last reduction or discard.
        """
        if not self._collected:
            raise GradientStateError(
                "reduce_scatter without a collect since the last reduction or discard: the step would only decay the "
                "weights. Call collect(more=False) on every rank first, also on a rank without gradients"
            )
        in_flight: list[Work] = []
        for index, bucket in enumerate(self.buckets):
            piece = self.grad_buf[self._piece(index)]
            if not self._staging:
                self._read_waiting(bucket.start, bucket.end, piece)
                continue
            if len(in_flight) == _NUM_STAGING:
                in_flight.pop(0).wait()
            staging = self._staging[index % _NUM_STAGING][: bucket.padded]
            self._read_waiting(bucket.start, bucket.end, staging)
            if self.comm:
                in_flight.append(collectives.reduce_scatter(piece, staging, group=self._group))
            else:
                piece.copy_(staging[self.rank * piece.numel() :][: piece.numel()])
        for work in in_flight:
            work.wait()
        self._note_reads()
        self._forget_waiting()
        self.master.grad = self.grad_buf

    def discard(self) -> None:
        """Forget what is waiting; clear ``.grad`` of the parameters and the master. Local; call it on every rank."""
        self._forget_waiting()
        for param in self.params:
            param.grad = None
        self.master.grad = None

    @torch.no_grad()
    def grad_sq_norm(self) -> Tensor:
        """Squared L2 norm over all ranks of what ``master.grad`` holds now: fp64, 0-dim, the same bits everywhere.

        Collective: one fp64 all-reduce of one element. Squares of fp32 are exact in fp64 and cannot overflow.
        Allocates two chunks of 2 MiB at most, whatever the size of the shard.

        Raises:
            GradientStateError: nothing was reduced yet, or the reduction was discarded or cleared.
        """
        grad = self.master.grad
        if grad is None:
            raise GradientStateError(
                "grad_sq_norm without a reduced gradient: call reduce_scatter first (and ask for the norm before "
                "discard or zero_grad)"
            )
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        for start in range(0, self._num_owned, _CHUNK):
            total += grad[start : min(start + _CHUNK, self._num_owned)].to(torch.float64).square_().sum()
        if self.comm:
            collectives.all_reduce_sum(total, group=self._group)
        return total[0]

    # Weights

    @torch.no_grad()
    def gather_params(self) -> None:
        """Put every rank's updated shard, rounded to nearest even, into the compute weights in place. Collective.

        Each parameter is rounded to its own dtype. One asynchronous all-gather per bucket, in order: in bf16 or fp16
        where all parameters of the bucket have that dtype (the owner rounds), else in fp32 (every rank rounds).
        """
        # AdamW can leave nan in the padding (eps=0 divides its zeros by zero, so does a nan clip coefficient).
        self.master.detach()[self._num_owned :].zero_()
        for start, values in self._gathered(self._wire_dtypes):
            write_flat(self.layout, self.params, start, values)

    @torch.no_grad()
    def full_master(self) -> Tensor:
        """The whole master, fp32 ``[N]``, without padding, on every rank. Collective: one fp32 all-gather per bucket.

        Raises:
            SimulationError: in simulation, where the other pieces are not known.
        """
        if self.sim:
            raise SimulationError(
                f"full_master in simulation: only the pieces of rank 0 of {self.world} exist. Run {self.world} ranks"
            )
        full = torch.empty(self.N, dtype=torch.float32, device=self.device)
        for start, values in self._gathered((torch.float32,) * len(self.buckets)):
            full[start : start + values.numel()].copy_(values)
        return full

    @torch.no_grad()
    def refresh_from_weights(self) -> None:
        """Rebuild the master from the compute weights, after they were changed from outside. Local.

        To be called after loading a checkpoint or merging an adapter: the next ``gather_params`` overwrites the
        compute weights with the master. The optimizer's moments stay as they are.
        """
        master = self.master.detach()
        for start, stop, shard_offset in self.layout.segments(self.rank):
            read_flat(self.layout, self.params, start, master[shard_offset : shard_offset + stop - start])

    def expected_collectives(
        self,
        call: Literal[
            "__init__", "has_grad_anywhere", "reduce_scatter", "grad_sq_norm", "gather_params", "full_master"
        ],
    ) -> tuple[Collective, ...]:
        """What ``call`` issues on every rank, in order, with the length this rank hands in.

        - ``__init__``: one uint8 all-gather of 32.
        - ``has_grad_anywhere``: one int32 all-reduce of 1.
        - ``reduce_scatter``: per bucket one fp32 reduce-scatter of ``padded``.
        - ``grad_sq_norm``: one fp64 all-reduce of 1.
        - ``gather_params``: per bucket one all-gather of ``padded / world``: bf16 or fp16 where every parameter with
          an element in the bucket has that dtype, else fp32.
        - ``full_master``: per bucket one fp32 all-gather of ``padded / world``.

        ``collect``, ``discard`` and ``refresh_from_weights`` issue none, nor does anything at world 1 or in simulation.
        """
        if not self.comm:
            return ()
        pieces = [self.layout.piece_len(index) for index in range(len(self.buckets))]
        match call:
            case "__init__":
                return AGREEMENT_COLLECTIVES
            case "has_grad_anywhere":
                return (Collective("all_reduce", torch.int32, 1),)
            case "reduce_scatter":
                return tuple(Collective("reduce_scatter", torch.float32, bucket.padded) for bucket in self.buckets)
            case "grad_sq_norm":
                return (Collective("all_reduce", torch.float64, 1),)
            case "gather_params":
                return tuple(Collective("all_gather", *sent) for sent in zip(self._wire_dtypes, pieces, strict=True))
            case "full_master":
                return tuple(Collective("all_gather", torch.float32, length) for length in pieces)
        raise ValueError(f"call={call!r} is not a method that communicates")

    # Internals

    def _piece(self, bucket: int) -> slice:
        """Where this rank's piece of bucket number ``bucket`` lies in the shard."""
        start = self.layout.piece_start(bucket)
        return slice(start, start + self.layout.piece_len(bucket))

    def _wire_dtype(self, start: int, end: int) -> torch.dtype:
        """In which dtype the flat range is gathered: rounded before it is sent where that halves the bytes."""
        dtypes = {self.params[span.parameter].dtype for span in self.layout.spans(start, end)}
        if dtypes in ({torch.bfloat16}, {torch.float16}):
            return dtypes.pop()
        return torch.float32

    def _read_waiting(self, start: int, end: int, out: Tensor) -> None:
        """``out`` becomes the waiting gradient of flat range ``[start, end)``; what is longer is padding: zeros."""
        values = out[: end - start]
        if self.held is not None:
            read_flat(self.layout, self.held, start, values)
        elif self._on_host and self.host is not None:
            values.copy_(self.host[start:end], non_blocking=True)
        else:
            values.zero_()
        out[end - start :].zero_()

    def _spill(self, grads: Sequence[Tensor | None]) -> None:
        """Move what is held to the host, and add this part. What is held stays so until both are there."""
        held, spilled = self.held, self._on_host
        try:
            if held is not None:
                self._add_to_host(held)
            self._add_to_host(grads)
        except BaseException:
            if spilled:  # some of this part may be in the sum
                self._forget_waiting()
            self._on_host = False
            raise
        self.held = None
        self.spills += not spilled

    def _add_to_host(self, grads: Sequence[Tensor | None]) -> None:
        """Add one part to the host vector; the first part of a step overwrites it."""
        first = not self._on_host
        host = self._writable_host()
        for begin, numel, grad in zip(self.offsets[:-1], self.numel, grads, strict=True):
            if grad is None:
                if first:
                    host[begin : begin + numel].zero_()
                continue
            for start in range(0, numel, _CHUNK):
                for view, offset in flat_views(grad, start, min(start + _CHUNK, numel)):
                    into = host[begin + start + offset :][: view.numel()].view(view.shape)
                    # Moved in its own dtype, converted there: copying bf16 from a device straight into fp32 on the
                    # host would convert on the device first, into a temporary. Converted before it is added: an
                    # fp64 gradient would otherwise be added in fp64.
                    part = view.to("cpu").to(torch.float32)
                    if first:
                        into.copy_(part)
                    else:
                        into.add_(part)
        self._on_host = True

    def _writable_host(self) -> Tensor:
        """The host vector, allocated at the first use, with no queued copy still reading it."""
        if self.host is None:
            pinned = self.device.type == "cuda"
            self.host = torch.empty(self.N, dtype=torch.float32, device="cpu", pin_memory=pinned)
        if self._host_read is not None:
            self._host_read.synchronize()
            self._host_read = None
        return self.host

    def _note_reads(self) -> None:
        """What was waiting is still read by what is queued: keep its memory from being written before that is done."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._on_host:
            self._host_read = stream.record_event()
        for grad in self.held or ():
            if grad is not None:
                grad.record_stream(stream)  # it may have been made on another

    def _forget_waiting(self) -> None:
        self.held = None
        self._on_host = False
        self._collected = False

    def _gathered(self, wire_dtypes: Sequence[torch.dtype]) -> Iterator[tuple[int, Tensor]]:
        """Master values as (flat start, 1D values): all buckets in order, or this rank's own without communication.

        The values must be used before the next are asked for: they lie in staging.
        """
        master = self.master.detach()
        if not self.comm:
            for start, stop, shard_offset in self.layout.segments(self.rank):
                yield start, master[shard_offset : shard_offset + stop - start]
            return
        previous: tuple[int, Tensor, Work] | None = None
        for index, (bucket, dtype) in enumerate(zip(self.buckets, wire_dtypes, strict=True)):
            piece = master[self._piece(index)]
            staging = self._staging[index % _NUM_STAGING].view(dtype)
            if dtype != torch.float32:
                # Viewed in two bytes an element, the buffer has room for the rounded piece behind the bucket.
                piece = staging[bucket.padded :][: piece.numel()].copy_(piece)
            received = staging[: bucket.padded]
            work = collectives.all_gather(received, piece, group=self._group)
            if previous is not None:
                yield _finish(*previous)
            previous = bucket.start, received[: bucket.end - bucket.start], work
        if previous is not None:
            yield _finish(*previous)


def _finish(start: int, values: Tensor, work: Work) -> tuple[int, Tensor]:
    work.wait()
    return start, values
