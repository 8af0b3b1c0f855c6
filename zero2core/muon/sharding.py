"""Muon and AdamW sharded over ranks: matrices whole on an owner, everything else in equal pieces.

A step, on every rank::

    for part in parts:
        loss(part).backward()       # gradients are added up in fp32, a hook a parameter
    optimizer.reduce_gradients()    # sums over ranks: matrices to their owners, the rest in pieces; divides once
    optimizer.step()                # clips, updates what this rank owns, gives the weights to all
    optimizer.clear_grad()

Every bit of the weights equals what an unsharded :class:`~zero2core.muon.inner.MuonAdamW` computes from the same
averaged gradients, since Newton-Schulz sees whole matrices of the same shape.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero2core import collectives
from zero2core.agreement import gather_texts, require_agreement
from zero2core.errors import GradientStateError
from zero2core.muon import state as saved
from zero2core.muon.arguments import (
    agree_or_refuse,
    arguments_problem,
    local_world_size,
    require_same_groups,
    shared_facts,
    wrong_type,
)
from zero2core.muon.buffers import Buffer, FlatBuffer, Member, WholeBuffer
from zero2core.muon.checkpoint import load_sharded_state, sharded_state
from zero2core.muon.clip import squared_norm
from zero2core.muon.config import DEFAULT_COLOR, MuonShardingConfig, color_key
from zero2core.muon.inner import MuonAdamW
from zero2core.muon.plan import MuonShardingPlan, TrainedParameter, make_plan
from zero2core.muon.route import Hops, Route, hops
from zero2core.muon.shard import Shard

__all__ = ["MuonShardingOptimizer"]

_holders: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to the optimizer whose hook it has
_log = logging.getLogger("zero2core")
_STATE_ALIGN = 16  # elements: 64 bytes


class _Phase(enum.Enum):
    """Where in a step: gradients come in; they are reduced; the update is done."""

    COLLECTING = "collecting"
    REDUCED = "reduced"
    STEPPED = "stepped"


class _Own:
    """What this rank owns of one parameter: ``master`` and ``state`` are whole, or a flat slice."""

    def __init__(self, buffer: Buffer, member: Member, start: int, stop: int, state: dict[str, Any]) -> None:
        self.buffer = buffer
        self.member = member
        self.start = start
        self.stop = stop
        self.state = state

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def master(self) -> Tensor:
        """fp32; of an fp32 parameter the compute weight itself."""
        master: Tensor | None = self.state.get("master")
        return self.buffer.own_weight(self.member, self.start, self.stop) if master is None else master

    @property
    def gradient(self) -> Tensor | None:
        return self.buffer.own_gradient(self.member, self.start, self.stop)


class MuonShardingOptimizer(torch.optim.Optimizer):
    """Shards a :class:`~zero2core.muon.inner.MuonAdamW` over the ranks of a group, bit for bit its unsharded self.

    Parameters are pointed into fused buffers at construction, once. Their gradients are taken off ``.grad`` as they
    come and added up in fp32; after :meth:`reduce_gradients` every ``.grad`` is None. Learning-rate schedulers work on
    it as on any optimizer; ``param_groups``, ``state`` and ``defaults`` are the inner one's.

    Args:
        inner: made of the whole parameters, which must be the same on every rank. Its state is replaced by this rank's
            share; give it ``defer_state=True`` to never have all of it in memory.
        group: the ranks that share the work; None: the default group, or this process alone where there is none.
        config: how.

    Attributes:
        plan: what lies where; ``str(plan)`` prints it.
        group, world, rank: the group as given, its number of ranks, and this process's place in it.
        grad_norm: joint norm (fp64, 0-dim) of the gradients that the last step's clip saw; None without a clip.

    Raises:
        ValueError: a colour names no parameter, has two groups, or a divisor but no parameter; mixed devices;
            parameters that share memory; the world is not divisible by ``local_world_size``. On all ranks, also where
            only one refuses.
        RankMismatchError: ranks were given different parameters or settings; on all ranks, with the first difference.
        TypeError: ``inner`` or ``config`` is something else.
        NotImplementedError: ``two_hop`` over a group that is not all ranks.

    Construction is collective: one all-gather of 32 bytes for the group and for each colour, and with ``two_hop`` two
    more and the new groups, once for the same ranks.
    """

    inner_class: ClassVar[type[MuonAdamW]] = MuonAdamW
    """What the harness makes for a class to wrap; a class of yours may name a variant."""

    def __init__(
        self,
        inner: MuonAdamW,
        group: dist.ProcessGroup | None = None,
        config: MuonShardingConfig | None = None,
    ) -> None:
        config = MuonShardingConfig() if config is None else config
        problem = wrong_type(inner, group, config)
        if problem is not None:
            agree_or_refuse(
                [], problem, group, collectives.group_device(group) if collectives.group_size(group) > 1 else None
            )
        self._complete = False
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.state = inner.state
        self._complete = True
        self.inner = inner
        self.config = config
        self.grad_norm: Tensor | None = None
        self.group = group
        self._phase = _Phase.COLLECTING
        self._in_no_sync = self._had_no_sync = False
        self._armed = config.comm_overlap
        self._missing: frozenset[str] = frozenset()
        self._cleared: set[Hashable] = set()
        self.world = collectives.group_size(group)
        self.rank = collectives.group_rank(group) if self.world > 1 else 0
        self._groups = self._agree()
        self.plan = self._make_plan()
        self._buffers = self._make_buffers(self._make_routes())
        self._members = {member.name: member for buffer in self._buffers for member in buffer.members}
        self._own = self._make_state()
        self._hook()
        if self.rank == 0:
            _log.info("MuonShardingOptimizer, load of each rank: %s", self.plan.report())

    # Construction

    def _agree(self) -> dict[Hashable, tuple[dist.ProcessGroup | None, tuple[int, ...]]]:
        """The group and its ranks of each colour that this rank is in. Collective; refuses on all ranks alike."""
        named = self.inner.named
        said = arguments_problem(self.inner, self.group, self.config, self.world)
        problem = None if said is None else ValueError(said)
        params = list(named.values())
        device = params[0].device if params else torch.device("cpu")
        agree_or_refuse(shared_facts(self.inner, self.config) if problem is None else [], problem, self.group, device)
        groups: dict[Hashable, dist.ProcessGroup | None] = {DEFAULT_COLOR: self.group}
        for entry in self.config.colors.values():
            if entry is not None and color_key(entry[0]) != DEFAULT_COLOR:
                groups[color_key(entry[0])] = entry[1]
        found: dict[Hashable, tuple[dist.ProcessGroup | None, tuple[int, ...]]] = {}
        for key in sorted(groups, key=lambda key: (key != DEFAULT_COLOR, repr(key))):
            ranks = collectives.group_ranks(groups[key])
            if collectives.group_world(groups[key]) is None:
                ranks = (0,)
            if ranks:
                found[key] = groups[key], ranks
        if self.world > 1 and any(self.config.color_of(name) != DEFAULT_COLOR for name in named):
            ranks_of = {key: ranks for key, (_, ranks) in found.items()}
            require_same_groups(ranks_of, group=self.group, device=device)
        return found

    def _make_plan(self) -> MuonShardingPlan:
        """The plan, compared with that of all other ranks of each colour's group. Collective."""
        trained = [
            TrainedParameter(
                name, tuple(param.shape), param.dtype, self.inner.info[name].use_muon, self.config.color_of(name)
            )
            for name, param in self.inner.named.items()
        ]
        given = {color_key(key): divisor for key, divisor in self.config.color_divisors.items()}
        ranks = {key: ranks for key, (_, ranks) in self._groups.items()}
        divisors = {key: given.get(key, float(len(ranks[key]))) for key in ranks}
        plan = make_plan(trained, ranks, divisors, self.config)
        device = next(iter(self.inner.named.values())).device
        for color in plan.colors:
            if len(color.ranks) > 1:
                part = MuonShardingPlan((color,), {}, {})
                group = self._groups[color.key][0]
                require_agreement("MuonShardingOptimizer, the plan", part.facts(), group=group, device=device)
        return plan

    def _make_routes(self) -> dict[Hashable, Route]:
        """How each colour's group communicates. With two hops collective over all ranks."""
        grids: dict[Hashable, Hops | None] = dict.fromkeys(self._groups)
        if self.config.two_hop and self.world > 1:
            if collectives.group_ranks(self.group) != tuple(range(collectives.group_world(None) or 1)):
                raise NotImplementedError(
                    "two_hop needs the group of all ranks: groups of nodes are made by all of them"
                )
            size = local_world_size(self.config)
            grids = {key: hops(ranks, size) for key, (_, ranks) in self._groups.items()}
            wanted = [group for grid in grids.values() if grid is not None for group in grid.groups()]
            # Every rank makes every group, in one order: whoever is only in some of them has to come all the same.
            text = ";".join(",".join(map(str, ranks)) for ranks in wanted)
            device = next(iter(self.inner.named.values())).device
            texts = gather_texts(text, group=self.group, device=device)
            groups = {tuple(map(int, part.split(","))) for said in texts for part in said.split(";") if part}
            for ranks in sorted(groups):
                collectives.subgroup(ranks)
        return {key: Route(group, ranks, grids[key]) for key, (group, ranks) in self._groups.items()}

    def _make_buffers(self, routes: Mapping[Hashable, Route]) -> list[Buffer]:
        """In the order in which all ranks communicate them."""
        config = self.config
        buffers: list[Buffer] = []
        for color in self.plan.colors:
            route, group = routes[color.key], self._groups[color.key][0]
            # With overlap a gradient may come when its buffer is under way: it is added to a sum, not to a mean.
            average = config.use_reduce_avg and not config.comm_overlap and route.world > 1
            average = average and collectives.has_average(group)
            for planned in color.buffers:
                params = [self.inner.named[slot.name] for slot in planned.slots]
                kind = FlatBuffer if planned.owner is None else WholeBuffer
                buffers.append(
                    kind(planned, route, params, divisor=color.divisor, average=average, parts=config.accumulate_steps)
                )
        if not config.release_gradients:
            for buffer in buffers:
                buffer.allocated()
        return buffers

    def _make_state(self) -> list[_Own]:
        """This rank's masters and moments, in place of all of the inner optimizer's."""
        inner = self.inner
        for param in inner.named.values():
            inner.state[param] = {}
        own = []
        for buffer in self._buffers:
            for member, start, stop in buffer.own():
                state = inner.init_state(member.name, buffer.own_weight(member, start, stop))
                own.append(_Own(buffer, member, start, stop, state))
        if self.config.fuse_optimizer_states and own:
            _fuse([one.state for one in own])
        for one in own:
            inner.state[one.member.param] = one.state
            if "master" in one.state:
                one.buffer.bind(one.member, one.state["master"])
            elif isinstance(one.buffer, FlatBuffer):
                one.buffer.bind(one.member, one.master)
        return own

    def _hook(self) -> None:
        """Take every gradient as it comes. The hooks end with this object, or where another one takes its place."""
        this = weakref.ref(self)
        for param in self.inner.named.values():
            before = _holders.get(param, lambda: None)()
            if before is not None:
                before._let_go()
            _holders[param] = this
        handles: list[Any] = []
        for member in self._members.values():
            register: Callable[..., Any] = member.param.register_post_accumulate_grad_hook
            handles.append(register(_taker(this, member)))
        self._let_go = weakref.finalize(self, _remove, handles)

    def _require_held(self) -> None:
        """The parameters are still where this optimizer has put them: else what it computes would reach nobody."""
        if not self._let_go.alive:
            raise GradientStateError(
                "another MuonShardingOptimizer was constructed on these parameters, which now live in its buffers: "
                "use that one"
            )
        for name, member in self._members.items():
            param, fused = member.param, member.buffer.weights
            # Of the storage, which clear_param_storage() may have freed: no view of it can be made then.
            here = param.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
            if not here or param.storage_offset() != member.slot.start or param.dtype != fused.dtype:
                raise GradientStateError(
                    f"{name}, {fused.dtype} on {fused.device} at construction, was given other memory since and is "
                    f"{param.dtype} on {param.device}: its weights would not be updated. Convert or move "
                    "the model before the optimizer is constructed, and write weights by copy_(), not into .data"
                )

    # Gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, a backward is not the last of its step: with ``comm_overlap`` it starts nothing. May be nested."""
        outer = self._in_no_sync
        self._in_no_sync = self._had_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = outer

    def _arrived(self, member: Member) -> None:
        """A hook fired: its parameter's ``.grad`` holds a gradient of the backward that runs."""
        param = member.param
        if getattr(param, "main_grad", None) is not None:
            return
        gradient = self.inner.waiting(member.name)
        if gradient is None:
            return
        self._take(member, gradient)
        param.grad = None
        if self._in_no_sync:
            return
        member.fired += 1
        if self._armed:
            self._launch_complete()

    @torch.no_grad()
    def _take(self, member: Member, gradient: Tensor) -> None:
        """Add a gradient to this step's."""
        if self._phase is _Phase.REDUCED:
            raise GradientStateError(
                f"a gradient of {member.name} came between reduce_gradients() and step(): it would be lost. Call "
                "step() or clear_grad() first"
            )
        if self._phase is _Phase.STEPPED:
            self._restart()
        member.buffer.add(member, gradient)

    def _launch_complete(self) -> None:
        """Start the next buffers whose gradients are all there; in their order, which is the same on every rank."""
        for buffer in self._buffers:
            if buffer.launched:
                continue
            if not buffer.complete(explicit=self._had_no_sync):
                return
            buffer.launch()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sum the gradients of this step over ranks and divide once. Collective, once a step on every rank.

        Takes what lies in ``.grad`` and ``main_grad`` (fp32, filled elsewhere; zeroed here) and was not taken by a
        hook. A parameter, and a rank, without gradient counts as zeros. Issues, buffer by buffer, one reduce to the
        owner or one reduce-scatter, in fp32 (with two hops two each); before they are waited for, one uint8 all-reduce
        a colour with ``skip_missing`` or ``comm_overlap``, and after it what came late, if anything did on any rank.

        Raises:
            GradientStateError: they are reduced already; a parameter was frozen or thawed since construction, or given
                other memory (``module.to()``, ``param.data = ...``), where no update would reach it.
            ValueError: a gradient that cannot be used, see :meth:`MuonAdamW.waiting`.
        """
        self._require_held()
        if self._phase is _Phase.REDUCED:
            raise GradientStateError("reduce_gradients() twice in one step: call step() or clear_grad() first")
        self.inner.require_same_trainable()
        self._take_what_lies_there()
        if self._phase is _Phase.STEPPED:
            self._restart()
        for buffer in self._buffers:
            if not buffer.launched:
                buffer.launch()
        late = self._told()
        for buffer, came_late in zip(self._buffers, late, strict=True):
            buffer.finish(late=came_late)
        for member in self._members.values():
            if self._had_no_sync:
                member.expected_last = max(member.expected_last, member.fired)
            else:
                member.expected = max(member.expected, member.fired)
        self._phase = _Phase.REDUCED
        self._had_no_sync = False

    def _take_what_lies_there(self) -> None:
        for member in self._members.values():
            gradient = self.inner.waiting(member.name)
            if gradient is not None:
                self._take(member, gradient)
                self._drop([member.param])
        # Of a group without this rank, which trains them elsewhere, or without elements.
        self._drop(param for name, param in self.inner.named.items() if name not in self._members)

    @staticmethod
    def _drop(params: Iterable[nn.Parameter]) -> None:
        """Forget the gradients that lie on these parameters."""
        for param in params:
            param.grad = None
            main: Tensor | None = getattr(param, "main_grad", None)
            if main is not None:
                main.zero_()

    def _told(self) -> list[bool]:
        """Of each buffer whether a gradient came late on any rank; also finds out which parameters have none."""
        config = self.config
        late: list[bool] = []
        missing: set[str] = set()
        for color in self.plan.colors:
            buffers = [buffer for buffer in self._buffers if buffer.plan.color == color.key]
            members = [member for buffer in buffers for member in buffer.members]
            flags = [buffer.late is not None for buffer in buffers] if config.comm_overlap else []
            flags += [member.touched for member in members] if config.skip_missing else []
            if flags and len(color.ranks) > 1:
                device = buffers[0].device if buffers else torch.device("cpu")
                told = torch.tensor(flags, dtype=torch.uint8, device=device)
                collectives.all_reduce_max(told, group=self._groups[color.key][0])
                flags = [bool(flag) for flag in told.tolist()]
            count = len(buffers) if config.comm_overlap else 0
            late += flags[:count] if config.comm_overlap else [False] * len(buffers)
            if config.skip_missing:
                there = zip(members, flags[count:], strict=True)
                missing |= {member.name for member, touched in there if not touched}
        self._missing = frozenset(missing)
        return late

    def _restart(self) -> None:
        """Begin a step: what was reduced before is forgotten."""
        for buffer in self._buffers:
            buffer.restart(release=False)
        self._phase = _Phase.COLLECTING
        self._had_no_sync = self._in_no_sync

    @torch.no_grad()
    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Forget the gradients of this step, also those in ``.grad`` and ``main_grad``.

        Local, except with ``comm_overlap`` after the last clear and before a reduction: then collectives may be under
        way on some ranks, and all ranks issue those of a whole reduction, so that they end. Once a step is enough.

        Args:
            set_to_zero: fill the fp32 buffers with zeros, and keep them also with ``release_gradients``. Either way no
                gradient waits afterwards.
        """
        self._drop(self.inner.named.values())
        if self._armed and self._phase is not _Phase.REDUCED:
            self._land()
        self._armed = self.config.comm_overlap
        self._restart()
        if set_to_zero:
            for buffer in self._buffers:
                buffer.allocated().zero_()
        elif self.config.release_gradients:
            for buffer in self._buffers:
                buffer.restart(release=True)

    def _land(self) -> None:
        """Finish what was launched on any rank, together with all others. Collective.

        No rank can ask the others whether they launched anything: the answer would queue up behind what they did.
        """
        for buffer in self._buffers:
            if not buffer.launched:
                buffer.launch()
        for buffer in self._buffers:
            buffer.finish(late=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """:meth:`clear_grad`, under the name that torch's optimizers have."""
        self.clear_grad(set_to_zero=not set_to_none)

    # Step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, update what this rank owns, give the new weights to all ranks. Collective.

        With a clip one fp64 all-reduce a colour and one for all; then, buffer by buffer, one broadcast from the owner
        or one all-gather (with two hops two each) in the parameters' dtype.

        Raises:
            GradientStateError: the gradients were not reduced since the last step, or others came after that; a
                parameter was frozen or thawed since construction, or given other memory.
            NotImplementedError: a ``closure``: it would run the backward after the reduction.
        """
        if closure is not None:
            raise NotImplementedError("a closure runs the backward inside step(), after the gradients were reduced")
        self._require_held()
        if self._phase is not _Phase.REDUCED:
            raise GradientStateError(
                "step() on gradients that are not reduced: call reduce_gradients() first, on every rank, also on one "
                "without gradients"
            )
        self.inner.require_same_trainable()
        for name, param in self.inner.named.items():
            if param.grad is not None:
                raise GradientStateError(
                    f"{name} got a .grad after reduce_gradients(): it would be lost. Assign gradients before it"
                )
        self._restore_storage()
        self._clip()
        for one in self._own:
            gradient = one.gradient
            if gradient is not None and one.name not in self._missing:
                self.inner.update(one.name, one.master, gradient, one.state)
        self._send(self._buffers)
        self._cleared.clear()
        self._phase = _Phase.STEPPED
        self._armed = False
        if self.config.release_gradients:
            for buffer in self._buffers:
                buffer.restart(release=True)

    def _send(self, buffers: Iterable[Buffer]) -> None:
        """Masters, rounded once, to the compute weights of all ranks."""
        sent = list(buffers)
        for buffer in sent:
            buffer.send()
        for buffer in sent:
            buffer.arrive()

    def _clip(self) -> None:
        """Scale own gradients as the inner optimizer's clip says."""
        clip = self.inner.grad_clip
        self.grad_norm = None
        if clip is None:
            return
        own = {one.name: self._own_sq_norm(one) for one in self._own}
        norms = self._sq_norms(own)
        names = [name for name in norms if name not in self._missing]
        need = [self.inner.info[name].need_clip for name in names]
        device = next(iter(self.inner.named.values())).device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for name, square in own.items():
            # Each element once, whatever its colour: every rank adds what it owns.
            if self.inner.info[name].need_clip and name not in self._missing:
                total += square
        if self.world > 1:
            collectives.all_reduce_sum(total, group=self.group)
        self.grad_norm = total[0].sqrt()
        squares = torch.stack([norms[name] for name in names]) if names else total[:0]
        factors = clip.factors(names, squares, total[0], need)
        by_name = dict(zip(names, factors.to(torch.float32).unbind(), strict=True))
        for one in self._own:
            if one.name in by_name and one.gradient is not None and self.inner.info[one.name].need_clip:
                one.gradient.mul_(by_name[one.name])

    def _sq_norms(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Squared norm (fp64) of each whole parameter of this rank's colours, in the order of the model. Collective.

        ``own``: of what this rank has of it.
        """
        found: dict[str, Tensor] = {}
        for color in self.plan.colors:
            members = [m.name for b in self._buffers if b.plan.color == color.key for m in b.members]
            if not members:
                continue
            device = next(iter(self.inner.named.values())).device
            squares = torch.zeros(len(members), dtype=torch.float64, device=device)
            for index, name in enumerate(members):
                if name in own:
                    squares[index] = own[name]
            if len(color.ranks) > 1:
                collectives.all_reduce_sum(squares, group=self._groups[color.key][0])
            found.update(zip(members, squares.unbind(), strict=True))
        return {name: found[name] for name in self.inner.named if name in found}

    def _own_sq_norm(self, one: _Own) -> Tensor:
        gradient = one.gradient
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=one.buffer.device)
        return squared_norm(gradient)

    # Storage of compute weights

    def clear_param_storage(self, color: Hashable = None) -> None:
        """Free the compute weights of a colour (None, -1: the default one) until :meth:`step`. Local.

        Nothing happens on a rank outside the colour's group: its weights are nobody's to give back.

        Raises:
            ValueError: no parameter has this colour, or one of it is fp32, which has no master beside it.
        """
        key = color_key(color)
        if key not in map(self.config.color_of, self.inner.named):
            raise ValueError(f"clear_param_storage({color!r}): no parameter has this colour")
        mine = [buffer for buffer in self._buffers if buffer.plan.color == key]
        whole = [member.name for buffer in mine for member in buffer.members if buffer.plan.dtype == torch.float32]
        if whole:
            raise ValueError(
                f"clear_param_storage({color!r}): {whole[0]} is fp32, its compute weights are its only ones; only "
                "parameters with fp32 masters can give them up"
            )
        for buffer in mine:
            buffer.weights.untyped_storage().resize_(0)
        if mine:
            self._cleared.add(key)

    @torch.no_grad()
    def reset_param_storage(self) -> None:
        """Give back what :meth:`clear_param_storage` freed, filled from the masters. Collective if anything was."""
        cleared = set(self._cleared)
        self._restore_storage()
        self._send(buffer for buffer in self._buffers if buffer.plan.color in cleared)
        self._cleared.clear()

    @torch.no_grad()
    def refresh_from_weights(self) -> None:
        """Rebuild the masters from the compute weights, after these were changed from outside, alike on all ranks.

        Local. For weights that were loaded into the model, which the next :meth:`step` overwrites with the masters.
        Moments stay as they are. Nothing to do for fp32 parameters, which are their own masters.

        Raises:
            GradientStateError: compute weights are freed (:meth:`clear_param_storage`), or no longer in the buffers.
        """
        self._require_held()
        if self._cleared:
            raise GradientStateError("refresh_from_weights() without weights: call reset_param_storage() first")
        for one in self._own:
            if "master" in one.state:
                one.state["master"].copy_(one.buffer.own_weight(one.member, one.start, one.stop))

    def _restore_storage(self) -> None:
        """Memory for the compute weights that were freed; whoever calls this fills them."""
        for buffer in self._buffers:
            if buffer.plan.color in self._cleared:
                storage = buffer.weights.untyped_storage()
                storage.resize_(buffer.weights.numel() * buffer.weights.itemsize)
                buffer.weights.zero_()

    # What this rank holds

    def local_shards(self) -> tuple[Shard, ...]:
        """What this rank owns: whole matrices, and slices that are not empty, in the order of communication. Local."""
        shards = []
        for one in self._own:
            gradient = None if one.name in self._missing else one.gradient
            state = {
                name: value.view(-1)
                for name, value in one.state.items()
                if isinstance(value, Tensor) and name in ("momentum", "exp_avg", "exp_avg_sq")
            }
            master = one.master.detach().view(-1)
            flat = None if gradient is None else gradient.view(-1)
            shards.append(Shard(one.name, one.start, one.stop, master, flat, state))
        return tuple(shards)

    def filter_parameters(self, names: Iterable[str]) -> list[Shard]:
        """Own whole tensors and slices that are not empty, among the parameters named.

        Raises:
            ValueError: there is no trainable parameter of that name.
        """
        wanted = list(names)
        for name in wanted:
            if name not in self.inner.named:
                raise ValueError(f"filter_parameters: no trainable parameter is called {name!r}")
        return [shard for shard in self.local_shards() if shard.name in wanted]

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """This rank's masters and moments by name, the settings of the groups and the clip's state. Local.

        To be loaded on the same rank of a world of the same plan; for another one see :meth:`sharded_state_dict`.
        """
        return saved.local_state(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave; nothing of it is changed. Local.

        Raises:
            ValueError: of another plan, or with other keys, shapes or dtypes, each named.
        """
        saved.load_local_state(self, state_dict)

    def sharded_state_dict(self, model_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's share of the state for :mod:`torch.distributed.checkpoint`, which another world can load.

        As ``dcp.save({"model": model_state_dict, "optimizer": state}, checkpoint_id=...)``; see
        :mod:`zero2core.muon.checkpoint` for what is in it. Tensors are the optimizer's own. With several colours
        collective: two uint8 all-gathers.

        Args:
            model_state_dict: of the module, whose parameters must have the names that the optimizer was given. Further
                names of tied weights are recorded as such. Other entries (buffers, frozen parameters) are left alone.

        Raises:
            ValueError: a parameter (named) is not in ``model_state_dict``, or there with another shape or dtype; or
                that has one (with ``keep_vars=True``, else it cannot be told) which the optimizer does not know.
        """
        return sharded_state(self, model_state_dict)

    def load_sharded_state_dict(
        self, model_state_dict: Mapping[str, Any], read: Callable[[dict[str, Any]], object]
    ) -> None:
        """Go on from what :meth:`sharded_state_dict` gave, on any number of ranks, with any plan. Collective.

        The weights of the model are loaded by the caller, as with every optimizer; masters are loaded here. Settings
        of the groups, the learning rate too, become those that were saved. When this raises, nothing has changed.

        Args:
            model_state_dict: as for :meth:`sharded_state_dict`.
            read: fills the values of a dict, in place, from where the state was saved; called twice:
                ``lambda state: dcp.load({"optimizer": state}, checkpoint_id=...)``.

        Raises:
            ValueError: the checkpoint is of another model, other dtypes, another choice of Muon's parameters, or
                another clip, the first of them named; or ``model_state_dict`` is older than this optimizer, which has
                moved the parameters.
            NotImplementedError: a colour whose groups were several, and are not the same here.
            RuntimeError: files are missing or cut short, or hold no such state; on all ranks. In place of torch's own
                ``CheckpointException``; whatever else ``read`` raises is passed on.
        """
        load_sharded_state(self, model_state_dict, read)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ``NotImplementedError`` once constructed: buffers and owners are decided."""
        if self._complete:
            raise NotImplementedError("parameters cannot be added: construct the optimizer anew with all of them")
        super().add_param_group(param_group)

    def __reduce__(self) -> NoReturn:
        """A copy would share buffers and hooks with this one."""
        raise TypeError(
            "a MuonShardingOptimizer can be neither copied nor pickled: parameters live in its buffers. Save "
            "state_dict() and construct another one"
        )

    def __getstate__(self) -> NoReturn:
        """See :meth:`__reduce__`."""
        self.__reduce__()

    def __repr__(self) -> str:
        """World, colours, buffers and parameters."""
        return (
            f"MuonShardingOptimizer(world={self.world}, colors={len(self.plan.colors)}, "
            f"buffers={len(self._buffers)}, parameters={len(self.inner.named)})"
        )


def _taker(this: weakref.ref[MuonShardingOptimizer], member: Member) -> Callable[[Tensor], None]:
    """A hook that does not keep the optimizer alive."""
    keep = weakref.ref(member)

    def arrived(param: Tensor) -> None:
        optimizer, found = this(), keep()
        if optimizer is not None and found is not None:
            optimizer._arrived(found)

    return arrived


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _fuse(states: list[dict[str, Any]]) -> None:
    """Move all tensors of the states into one storage."""
    tensors = [(state, name) for state in states for name, value in state.items() if isinstance(value, Tensor)]
    at = 0
    places = []
    for state, name in tensors:
        places.append(at)
        at += -(-state[name].numel() // _STATE_ALIGN) * _STATE_ALIGN
    if not tensors:
        return
    first: Tensor = tensors[0][0][tensors[0][1]]
    storage = torch.zeros(at, dtype=torch.float32, device=first.device)
    for (state, name), start in zip(tensors, places, strict=True):
        value: Tensor = state[name]
        view = storage[start : start + value.numel()].view(value.shape)
        view.copy_(value)
        state[name] = view
