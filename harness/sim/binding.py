"""The only module of the simulator that touches what torch keeps private: the state of ``torch.distributed``.

torch keeps the process groups of a process in one object, ``distributed_c10d._world``. Each rank of a simulated world
has one of its own, and the one of the rank whose turn it is stands in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from harness.sim.refusal import HINT, Refused

BACKEND = "gloo"
"""What ``get_backend()`` answers: a simulated world does as gloo does."""

_CONFIG = "cpu:gloo,cuda:gloo"
_REQUIRED: dict[str, tuple[str, ...]] = {
    "torch.distributed.distributed_c10d": (
        *("_world", "_World", "_new_process_group_helper", "PrefixStore", "rendezvous"),
    ),
    "torch._C": ("DisableTorchFunction", "_DisableTorchDispatch"),
    "torch._C._distributed_c10d": (
        "_register_process_group",
        "_unregister_all_process_groups",
        "_set_thread_isolation_mode",
        "_set_global_rank",
    ),
}
_DISPATCHER, _HANDLERS = "_op_dispatcher", "_custom_op_handlers"
_WORLD_PROPERTIES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
)


class TorchMismatchError(RuntimeError):
    """This version of torch does not have what the simulator builds on."""


def _private(module: str) -> ModuleType:
    found = importlib.import_module(module)
    missing = [name for name in _REQUIRED[module] if not hasattr(found, name)]
    if missing:
        raise TorchMismatchError(
            f"--backend sim builds on {module}.{', '.join(missing)}, which torch {torch.__version__} does not have; "
            "it was tested with torch 2.13: use that, or --backend gloo"
        )
    return found


_c10d: Any = _private("torch.distributed.distributed_c10d")
_C: Any = _private("torch._C._distributed_c10d")
_torch: Any = _private("torch._C")
_original: Any = _c10d._world


class TorchState(_c10d._World):  # type: ignore[misc]
    """The process groups of one rank; in place of ``distributed_c10d._world`` while it is the rank's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[Any, Any] | None = None
        self._own: dict[str, Any] = {name: {} for name in _WORLD_PROPERTIES}
        self._count = 0

    @property
    def group_count(self) -> int:
        """How many groups were made: torch names them by it."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value

    def default(self, group: dist.ProcessGroup, store: Store, rank: int) -> None:
        """Make this group the default one. In the rank's own thread, with this state in use."""
        name = str(self._count)
        self._count += 1
        self.default_pg = group
        _C._set_global_rank(rank)
        self.register(group, name, store, None)
        self.pg_group_ranks[group] = {each: each for each in range(group.size())}

    def known(self, rank: int) -> list[Any]:
        """The groups there are; in the rank's own thread, in which torch finds them from now on, also from C++."""
        _C._set_global_rank(rank)
        for group, name in self.pg_names.items():
            _C._register_process_group(name, group)
        return list(self.pg_names)

    def register(self, group: dist.ProcessGroup, name: str, store: Store, tag: str | None) -> None:
        """Enter a group where torch looks for it, also from C++."""
        tag = f"user:{tag}" if tag else f"ptd:{name}"
        self.pg_map[group] = (BACKEND, store)
        self.pg_names[group] = name
        self.pg_backend_config[group] = _CONFIG
        self.tags_to_pg.setdefault("", []).append(group)
        self.tags_to_pg.setdefault(tag, []).append(group)
        self.pg_to_tag[group] = tag
        _C._register_process_group(name, group)


def _own(name: str) -> property:
    return property(lambda state: state._own[name])


for _name in _WORLD_PROPERTIES:
    setattr(TorchState, _name, _own(_name))


def use(state: TorchState | None) -> None:
    """From now on ``torch.distributed`` works on this rank's groups; None: on those of the process."""
    _change_handlers(_c10d._world, state)
    _c10d._world = _original if state is None else state


_common_handlers: dict[Any, Any] | None = None


def _change_handlers(before: object, after: TorchState | None) -> None:
    """A context manager such as ``loss_parallel()`` changes for the whole process what operators on DTensors do."""
    global _common_handlers
    dispatcher: Any = getattr(getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None), _DISPATCHER, None)
    present = getattr(dispatcher, _HANDLERS, None)
    if present is None:
        return
    if _common_handlers is None:
        # A rank that imported it may have changed them since.
        _common_handlers = getattr(type(dispatcher)(), _HANDLERS) if isinstance(before, TorchState) else present
    if isinstance(before, TorchState):
        before.handlers = present
    if after is not None and after.handlers is None:
        after.handlers = dict(_common_handlers)
    setattr(dispatcher, _HANDLERS, _common_handlers if after is None else after.handlers)


def in_use() -> TorchState | None:
    """The state of the rank whose turn it is; None outside a simulated world."""
    state = _c10d._world
    return state if isinstance(state, TorchState) else None


def forget_groups() -> None:
    """Let go of the groups of this rank. In the rank's own thread."""
    _C._unregister_all_process_groups()


MakeGroup = Callable[[str, tuple[int, ...]], dist.ProcessGroup]
"""Makes, or joins, the group of this name and these global ranks; of the rank whose turn it is."""

_make_group: MakeGroup | None = None


def enter(make_group: MakeGroup) -> None:
    """A world begins: new groups of its ranks come from ``make_group``. One at a time in a process.

    Raises:
        RuntimeError: There is one already, or this process has a default group.
    """
    global _make_group
    if _make_group is not None:
        raise RuntimeError("a simulated world runs in this process already: one at a time")
    if dist.is_initialized():
        raise RuntimeError("a simulated world needs a process without a default process group: destroy it first")
    install()
    _make_group = make_group
    _C._set_thread_isolation_mode(True)


def leave() -> None:
    """The world has ended."""
    global _make_group
    _make_group = None
    use(None)
    _C._set_thread_isolation_mode(False)


_installed = False


def install() -> None:
    """Put what makes groups, and what tells meshes apart, in place; once in a process, and idle outside a world."""
    global _installed
    if _installed:
        return
    _installed = True
    original = _c10d._new_process_group_helper

    def new_process_group_helper(
        group_size: int,
        group_rank: int | None,
        global_ranks_in_group: list[int],
        backend: Any,  # noqa: ANN401
        store: Store,
        group_name: str,
        *rest: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        state = in_use()
        if state is None or _make_group is None:
            return original(group_size, group_rank, global_ranks_in_group, backend, store, group_name, *rest, **named)
        if not set(str(backend).split(",")) <= {"gloo", "undefined", "cpu:gloo", "cuda:gloo"}:
            raise RuntimeError(f"new_group with backend {backend}: a simulated world does as gloo does, and no other")
        if not global_ranks_in_group:
            if group_size == 0:
                raise ValueError("new_group of no ranks: expected some of the world's")
            raise Refused(_SECOND_DEFAULT)
        ranks = tuple(global_ranks_in_group)
        if state.default_pg.rank() not in ranks:
            return _c10d.GroupMember.NON_GROUP_MEMBER, None
        group = _make_group(group_name, ranks)
        if "group_desc" in named:
            group._set_group_desc(named["group_desc"])
        prefixed = _c10d.PrefixStore(f"{group_name}/", store)
        state.register(group, group_name, prefixed, named.get("pg_tag"))
        return group, prefixed

    _c10d._new_process_group_helper = new_process_group_helper
    _meet_nobody()
    _tell_meshes_apart()
    # Its functions take the default group of the moment in which it is imported: that must not be one rank's.
    importlib.import_module("torch.distributed.nn.functional")


_SECOND_DEFAULT = (
    "init_process_group: the default group of a simulated world is there from the start, and cannot be made again "
    f"after destroy_process_group(); {HINT}"
)


def _meet_nobody() -> None:
    """A second default group would meet the others at an address, and wait there without handing its turn on."""
    original = _c10d.rendezvous

    def rendezvous(*rest: Any, **named: Any) -> Any:  # noqa: ANN401
        if in_use() is not None:
            raise Refused(_SECOND_DEFAULT)
        return original(*rest, **named)

    _c10d.rendezvous = rendezvous


class _Answer(str):
    """``"gloo"``, which also passes for torch's own threaded backend."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "threaded" or str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def _tell_meshes_apart() -> None:
    """Equal meshes of two ranks are not the same mesh: a DeviceMesh takes its thread into account if it is asked to.

    torch caches by mesh what belongs to one rank; of its own threaded backend it knows that.
    """
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    original = meshes.get_backend

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        answer: str = original(group)
        return _Answer(answer) if in_use() is not None else answer

    meshes.get_backend = get_backend


def no_torch_function() -> Any:  # noqa: ANN401 (a context manager, to be made anew each time)
    """Tensors' own functions, of modes and subclasses, are not called inside."""
    return _torch.DisableTorchFunction()


def no_torch_dispatch() -> Any:  # noqa: ANN401 (a context manager, to be made anew each time)
    """Dispatch modes and subclasses do not see operations inside."""
    return _torch._DisableTorchDispatch()


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Keep ``torch.compile`` from a function and what it calls; where torch has no such thing, it may compile it."""
    with contextlib.suppress(ImportError):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def one_thread_of_autograd() -> Any:  # noqa: ANN401 (a context manager)
    """Have backward passes of this thread run in it: a thread of the engine's own would belong to no rank."""
    return torch.autograd.set_multithreading_enabled(False)
