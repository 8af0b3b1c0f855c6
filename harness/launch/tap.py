"""A record of every collective a rank calls, taken at the functions of ``torch.distributed``.

The functions are replaced once per process, before any module of the user's is imported, so that
``from torch.distributed import all_reduce`` binds the replacement. Not seen: methods called on a process group itself,
the operators ``torch.ops._c10d_functional`` that DTensor uses, and what DDP's reducer does in C++.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Function -> (kind, parameter that holds what this rank contributes). All names that torch has or had; those it
# lacks are passed over. A scatter has no input on most ranks, so its output, equal everywhere, stands for it.
# batch_isend_irecv is absent because it calls isend and irecv, which are recorded.
_FUNCTIONS: dict[str, tuple[str, str | None]] = {
    "all_gather": ("all_gather", "tensor"),
    "all_gather_coalesced": ("all_gather", "input_tensor_list"),
    "all_gather_into_tensor": ("all_gather", "input_tensor"),
    "all_gather_single": ("all_gather", "input_tensor"),
    "_all_gather_base": ("all_gather", "input_tensor"),
    "all_gather_object": ("all_gather_object", None),
    "all_reduce": ("all_reduce", "tensor"),
    "all_reduce_coalesced": ("all_reduce", "tensors"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "barrier": ("barrier", None),
    "monitored_barrier": ("barrier", None),
    "broadcast": ("broadcast", "tensor"),
    "broadcast_object_list": ("broadcast_object_list", None),
    "gather": ("gather", "tensor"),
    "gather_object": ("gather_object", None),
    "reduce": ("reduce", "tensor"),
    "reduce_scatter": ("reduce_scatter_list", "input_list"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_reduce_scatter_base": ("reduce_scatter", "input"),
    "scatter": ("scatter", "tensor"),
    "scatter_object_list": ("scatter_object_list", None),
    "send": ("send", "tensor"),
    "isend": ("send", "tensor"),
    "send_object_list": ("send_object_list", None),
    "recv": ("recv", "tensor"),
    "irecv": ("recv", "tensor"),
    "recv_object_list": ("recv_object_list", None),
    "new_group": ("new_group", None),
    "split_group": ("split_group", None),
    # No collective, but what the others wait for in vain; only of the default group.
    "destroy_process_group": ("destroy_process_group", None),
}
# Where the function names the group, if not by a parameter `group`.
_GROUP_PARAMETERS = {"new_group": "ranks", "split_group": "parent_pg"}
# One rank plays another part in these, and all must mean the same one: by its rank in all, or by that in the group.
_ROOTED = {
    "broadcast": ("src", "group_src"),
    "broadcast_object_list": ("src", "group_src"),
    "gather": ("dst", "group_dst"),
    "gather_object": ("dst", "group_dst"),
    "reduce": ("dst", "group_dst"),
    "scatter": ("src", "group_src"),
    "scatter_object_list": ("src", "group_src"),
}


_REDUCTIONS = ("AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class LoggedCollective(NamedTuple):
    """One call.

    Attributes:
        kind: What it does, under one name for all its spellings (``reduce_scatter_tensor`` is ``reduce_scatter``). A
            reduce-scatter of a list is a kind of its own: gloo makes it one ``reduce`` for each rank.
        dtype: Of the contribution, as ``"bfloat16"``; empty where there is no tensor (barriers, objects, new groups).
        length: Elements this rank contributes: the whole input of a reduce-scatter or all-to-all, the shard of an
            all-gather, the tensor of anything else; 0 where there is no tensor.
        group_ranks: The global ranks of the group, in its order.
        label: What :meth:`CollectiveLog.mark` had been given.
        how: What else all ranks must agree on: ``"with MAX"`` where it does not sum, ``"root 1"``, ``"on group 3"`` if
            it is not the default one, of a new group ``"of ranks 0, 1"``; empty where nothing is to be said.
    """

    kind: str
    dtype: str
    length: int
    group_ranks: tuple[int, ...]
    label: object
    how: str = ""


class PendingCollective:
    """A call that is about to be made; for :attr:`CollectiveLog.intercept`.

    Attributes:
        name: Of the function of ``torch.distributed``.
        kind: As in :class:`LoggedCollective`.
        contribution: The parameter that holds what this rank contributes; None where there is none.
        bound: The arguments; what is changed in them is what is called and recorded.
        group_ranks: The global ranks of the group, in its order.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        contribution: str | None,
        bound: inspect.BoundArguments,
        group_ranks: tuple[int, ...],
        function: Callable[..., Any],
    ) -> None:
        self.name = name
        self.kind = kind
        self.contribution = contribution
        self.bound = bound
        self.group_ranks = group_ranks
        self._function = function

    def call(self) -> Any:  # noqa: ANN401 (gives what the function does)
        """Record the call and make it; may be done more than once."""
        return self._function(*self.bound.args, **self.bound.kwargs)


class CollectiveLog:
    """The collectives this process called since :meth:`begin`, in order.

    ``mirror`` is called with each entry and what the rank contributes (a tensor, a list, or None) before its collective
    begins, for a handler that keeps a copy elsewhere or looks at it.
    ``intercept``, until the next :meth:`begin`, is called in place of each outermost call through a group of this rank,
    before it is recorded; the caller gets what it returns.

    ``unrecorded`` is called before each call that is not recorded, so that also those show that the rank gets on.

    Only the outermost call is recorded (``all_gather_object`` calls ``all_gather``), when it is made, also if it then
    raises. Calls through a group that this rank is not in do nothing and are not recorded.
    """

    def __init__(self) -> None:
        self.entries: list[LoggedCollective] = []
        self.label: object = None
        self.mirror: Callable[[LoggedCollective, object], None] | None = None
        self.unrecorded: Callable[[], None] | None = None
        self.intercept: Callable[[PendingCollective], Any] | None = None

    def begin(self) -> None:
        """Forget everything recorded so far, the label, and who intercepts."""
        self.entries = []
        self.label = None
        self.intercept = None

    def mark(self, label: object) -> None:
        """Store ``label`` with every call from now on."""
        self.label = label

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls of this thread inside the block are not recorded: a handler's own, not those of what it runs."""
        before, _per_thread.inside = _per_thread.inside, True
        try:
            yield
        finally:
            _per_thread.inside = before


class _PerThread(threading.local):
    """Autograd may run on other threads, so nesting is a matter of each thread."""

    inside = False


_per_thread = _PerThread()
_dtype_names: dict[torch.dtype, str] = {}
_installed = False
_own = CollectiveLog()
_log = _own  # in use


def use(log: CollectiveLog) -> None:
    """Record into this log from now on: where several ranks share a process, each has its own and they take turns.

    A call belongs to the log that is in use when it is made, also if others are used before it returns.
    """
    global _log
    _log = log


def install() -> CollectiveLog:
    """Replace the functions of ``torch.distributed``, wherever torch's own modules hold them.

    Returns:
        The process's own log, every time the same one; it is in use until :func:`use` says otherwise.
    """
    global _installed
    if _installed:
        return _own
    replacements: dict[int, Callable[..., Any]] = {}
    originals: list[Callable[..., Any]] = []
    for name, (kind, contribution) in _FUNCTIONS.items():
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            originals.append(original)
            replacements[id(original)] = _tapped(original, name, kind, contribution)
    # By identity, not by name: some modules of torch have bound the functions when they were imported.
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torch" and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in replacements:
                    setattr(module, attribute, replacements[id(value)])
    _installed = True
    return _own


def _tapped(original: Callable[..., Any], name: str, kind: str, contribution: str | None) -> Callable[..., Any]:
    """``original``, recorded in the log in use when it is the outermost call of its thread."""
    signature = inspect.signature(original)
    tensor = None if contribution is None else _Argument(signature, contribution)
    find_ranks = _finder(signature, name)
    describe = _describer(signature, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (takes and gives what the original does)
        ranks = find_ranks(args, kwargs)
        if ranks is not None:
            dtype, length = "", 0
            tensors: object = None
            if tensor is not None:
                tensors = tensor.of(args, kwargs)
                dtype, length = _measure(tensors)
            how = "" if describe is None else describe(args, kwargs, ranks)
            log = _log
            entry = LoggedCollective(kind, dtype, length, ranks, log.label, how)
            log.entries.append(entry)
            if log.mirror is not None:
                log.mirror(entry, tensors)
        _per_thread.inside = True
        try:
            return original(*args, **kwargs)
        finally:
            _per_thread.inside = False

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (takes and gives what the original does)
        log = _log
        if _per_thread.inside:
            if log.unrecorded is not None:
                log.unrecorded()
            return original(*args, **kwargs)
        if log.intercept is None:
            return recorded(*args, **kwargs)
        ranks = find_ranks(args, kwargs)
        if ranks is None:
            return recorded(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return recorded(*args, **kwargs)  # torch says what is wrong with it
        return log.intercept(PendingCollective(name, kind, contribution, bound, ranks, recorded))

    return tapped


def _measure(tensors: object) -> tuple[str, int]:
    """The dtype and number of elements of a tensor or of a list of them; of anything else nothing (torch raises)."""
    if isinstance(tensors, torch.Tensor):
        dtype = tensors.dtype
        name = _dtype_names.get(dtype)
        if name is None:
            name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
        return name, tensors.numel()
    if isinstance(tensors, Sequence):
        measured = [_measure(tensor) for tensor in tensors]
        return (measured[0][0] if measured else ""), sum(length for _, length in measured)
    return "", 0


class _Argument:
    """A parameter of a function, looked up in the arguments of a call."""

    def __init__(self, signature: inspect.Signature, name: str) -> None:
        self._name = name
        self._index = list(signature.parameters).index(name)

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 (whatever was given)
        """What was given; None if nothing was."""
        return args[self._index] if len(args) > self._index else kwargs.get(self._name)


_FindRanks = Callable[[Sequence[Any], Mapping[str, Any]], tuple[int, ...] | None]


def _finder(signature: inspect.Signature, name: str) -> _FindRanks:
    """What finds the global ranks that must all make a call, from its arguments."""
    group = _Argument(signature, _GROUP_PARAMETERS.get(name, "group"))
    if name == "destroy_process_group":
        return lambda args, kwargs: _ranks_if_default(group.of(args, kwargs))
    if name != "new_group":
        return lambda args, kwargs: _ranks_of_group(group.of(args, kwargs))
    local = _Argument(signature, "use_local_synchronization")

    def find(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
        # All ranks must ask for a new group, also those that are not to be in it, unless it says otherwise.
        members = group.of(args, kwargs)
        return tuple(sorted(members)) if members and local.of(args, kwargs) else _ranks_of_group(None)

    return find


_Describe = Callable[[Sequence[Any], Mapping[str, Any], tuple[int, ...]], str]


def _describer(signature: inspect.Signature, name: str) -> _Describe | None:
    """What finds out ``how`` of a call, from its arguments and the ranks of its group; None where there is none."""
    if name == "new_group":
        members = _Argument(signature, "ranks")
        return lambda args, kwargs, _: _of_ranks(members.of(args, kwargs))
    op = _Argument(signature, "op") if "op" in signature.parameters else None
    roots = [_Argument(signature, root) for root in _ROOTED.get(name, ()) if root in signature.parameters]
    group = _Argument(signature, "group") if "group" in signature.parameters else None
    if group is None:
        return None

    def describe(args: Sequence[Any], kwargs: Mapping[str, Any], ranks: tuple[int, ...]) -> str:
        words = [] if op is None else [_reduction(op.of(args, kwargs))]
        if roots:
            words.append(_root(*(root.of(args, kwargs) for root in roots), ranks=ranks))
        words.append(_group_name(group.of(args, kwargs)))
        return " ".join(filter(None, words))

    return describe


def _reduction(op: object) -> str:
    """``with MAX``; empty for the sum, which is the default, and for what is none (torch raises)."""
    if op is None or op == dist.ReduceOp.SUM:
        return ""
    return next((f"with {name}" for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), "")


def _root(root: object, root_in_group: object = None, *, ranks: tuple[int, ...]) -> str:
    """``root 1``, by its rank in all; empty where none is named."""
    if root is None and isinstance(root_in_group, int) and 0 <= root_in_group < len(ranks):
        root = ranks[root_in_group]
    return f"root {root}" if isinstance(root, int) else ""


def _group_name(group: object) -> str:
    """``on group 3``; empty for the default one. Torch numbers groups as they are made, on all ranks alike."""
    if not isinstance(group, dist.ProcessGroup) or group is dist.group.WORLD:
        return ""
    return f"on group {group.group_name[:12]}"


def _of_ranks(members: object) -> str:
    listed = sorted(members) if isinstance(members, Sequence) else []
    return f"of {'rank' if len(listed) == 1 else 'ranks'} {', '.join(map(str, listed))}" if listed else ""


def _ranks_of_group(group: object) -> tuple[int, ...] | None:
    """The global ranks of a group (None: the default one); None for what is no group of this rank."""
    if group is None:
        if not dist.is_initialized():
            return None
    elif not isinstance(group, dist.ProcessGroup):
        return None
    return tuple(dist.get_process_group_ranks(group))


def _ranks_if_default(group: object) -> tuple[int, ...] | None:
    """The ranks of the default group, if that is the one; leaving another one is nobody's matter."""
    return _ranks_of_group(None) if group is None or group is dist.group.WORLD else None
