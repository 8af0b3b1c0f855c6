"""Import a subject's class in a rank and check that it has the interface of the contract, before building it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import exception_text, sendable
from harness.scenario.model import EXTENSIONS, System
from harness.scenario.strategy import DECLARABLE
from harness.subjects.builtin import BUILTIN

METHODS = ("collect", "reduce_scatter", "grad_sq_norm", "discard", "gather_params")
MUON_METHODS = (
    "reduce_gradients",
    "step",
    "clear_grad",
    "local_shards",
    "no_sync",
    "clear_param_storage",
    "reset_param_storage",
    "state_dict",
    "load_state_dict",
)
_TELLS_MUON = MUON_METHODS[:4]  # a class that has all of these and no collect() is one
STRATEGY_METHODS = ("wrap", "clip_grad_norm", "no_sync")
_NO_STRATEGY = ("collect", "reduce_gradients")  # a class that has one of these is one of the others
ATTRIBUTES = ("master", "has_grad", "spills")
DECLARATION = "verify_extensions"
_DECLARED_METHODS = {"refresh": "refresh_from_weights", "flush": "flush", "dedicated": "dedicated"}


class SubjectError(Exception):
    """The subject cannot be used: it does not import, or lacks the interface. The message is for its author."""


def load_class(subject: str, args: dict[str, Any] | None = None) -> type:
    """The class named by a built-in name, ``package.module:Class`` or ``/path/file.py:Class``, checked.

    The current directory is importable, and so is the directory of the file.

    Raises:
        SubjectError: with the reason, and for an import that raises, the last lines of its traceback.
    """
    builtin = BUILTIN.get(subject)
    where, _, name = (builtin.target if builtin else subject).rpartition(":")
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
        cls = getattr(module, name, None)  # a module may import its classes only now
    except BaseException as error:  # a user's file may raise anything, SystemExit too
        raise SubjectError(sendable(f"cannot import {where}: {exception_text(error)}{_last_place(error)}")) from error
    if cls is None and name not in vars(module):
        classes = sorted(key for key, value in vars(module).items() if inspect.isclass(value))
        raise SubjectError(f"{where} has no class {name!r} (it has: {', '.join(classes) or 'none'})")
    if not inspect.isclass(cls):
        raise SubjectError(f"{where}:{name} is no class but {type(cls).__name__}")
    _check_interface(cls, f"{where}:{name}", args or {})
    return cls


def missing_attributes(instance: object) -> list[str]:
    """Which attributes of the contract a freshly built instance lacks."""
    return [name for name in ATTRIBUTES if not hasattr(instance, name)]


def system_of(cls: type) -> System:
    """What kind of system a class is, by its interface."""
    if all(_has(cls, name) for name in STRATEGY_METHODS) and not any(_has(cls, name) for name in _NO_STRATEGY):
        return "strategy"
    if _has(cls, "collect") or not all(_has(cls, name) for name in _TELLS_MUON):
        return "zero_master"
    return "muon"


def _has(cls: type, method: str) -> bool:
    return callable(getattr(cls, method, None))


def _check_interface(cls: type, title: str, args: dict[str, Any]) -> None:
    declared(cls, title)
    if system_of(cls) == "strategy":
        _check_signature(
            cls, f"{title} cannot be constructed as Class(config, device=..., local_rank=...", args, "strategy"
        )
        return
    if system_of(cls) == "muon":
        missing = [name for name in MUON_METHODS if not _has(cls, name)]
        if missing:
            raise SubjectError(
                f"{title} lacks a part of the interface of MuonShardingOptimizer: no method {', '.join(missing)} "
                f"(needed: {', '.join(MUON_METHODS)})"
            )
        _check_signature(cls, f"{title} cannot be constructed as Class(inner, group=..., config=...", args, "muon")
        return
    lacking = [name for name in STRATEGY_METHODS if not _has(cls, name)]
    if len(lacking) == 1 and not any(_has(cls, name) for name in METHODS):
        raise SubjectError(
            f"{title} lacks a part of the interface of a distribution strategy: no method {lacking[0]} "
            f"(needed: {', '.join(STRATEGY_METHODS)}; see docs/strategies.md, 'Verify your own strategy')"
        )
    missing = [name for name in METHODS if not _has(cls, name)]
    if missing:
        raise SubjectError(
            f"{title} lacks the interface of ZeroMaster: no method {', '.join(missing)} "
            f"(needed: {', '.join(METHODS)}; see docs/your-class.md){_almost_another(cls)}"
        )
    _check_signature(
        cls, f"{title} cannot be constructed as Class(params, rank, world, bucket=...", args, "zero_master"
    )


def _almost_another(cls: type) -> str:
    """Where a class rather looks like one of the other interfaces: what it lacks of that."""
    lacking = [name for name in STRATEGY_METHODS if not _has(cls, name)]
    if not lacking:
        beside = ", ".join(name for name in _NO_STRATEGY if _has(cls, name))
        return f". It is taken for no distribution strategy since it has a method {beside}"
    if lacking != ["wrap", "clip_grad_norm"] and len(lacking) < len(STRATEGY_METHODS):  # others have no_sync, too
        return f". To be taken for a distribution strategy it lacks {', '.join(lacking)}"
    missing = [name for name in _TELLS_MUON if not _has(cls, name)]
    if len(missing) > len(_TELLS_MUON) // 2:
        return ""
    if not missing:
        return ". It is taken for no MuonShardingOptimizer since it has a method collect"
    return f". To be taken for a MuonShardingOptimizer it lacks {', '.join(missing)}"


def _check_signature(cls: type, call: str, args: dict[str, Any], system: System) -> None:
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return
    try:
        if system == "strategy":
            signature.bind({}, device=None, local_rank=0, **args)
        elif system == "muon":
            signature.bind(object(), group=None, config=None, **args)
        else:
            signature.bind([], 0, 1, bucket=1, **args)
    except TypeError as error:
        raise SubjectError(f"{call}{_shown(args)}): {error}; its signature is {signature}") from error


def declared(cls: type, title: str = "the class") -> tuple[str, ...]:
    """What a class says, in ``verify_extensions``, that it takes beyond the contract's space: names of
    :class:`harness.scenario.model.Extension`, of a distribution strategy those of
    :data:`harness.scenario.strategy.DECLARABLE`; nothing where it says nothing.

    Raises:
        SubjectError: it says something else.
    """
    names = getattr(cls, DECLARATION, ())
    known = DECLARABLE if system_of(cls) == "strategy" else EXTENSIONS
    if not isinstance(names, tuple | list | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise SubjectError(f"{title}.{DECLARATION} must be names of {', '.join(known)}, it is {type(names).__name__}")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SubjectError(
            f"{title}.{DECLARATION} names {', '.join(map(ascii, unknown))}, which is no extension "
            f"(there are: {', '.join(known)})"
        )
    for name, method in _DECLARED_METHODS.items():
        if name in names and not callable(getattr(cls, method, None)):
            raise SubjectError(f"{title}.{DECLARATION} names {name!r}, but there is no method {method}")
    if "deferred" in names and not _takes_defer(cls):
        raise SubjectError(
            f"{title}.{DECLARATION} names 'deferred', but no_sync has no parameter defer: it is called as "
            'no_sync(model, defer="all_reduce")'
        )
    return tuple(name for name in known if name in names)


def _takes_defer(cls: type) -> bool:
    """Whether ``no_sync(model, defer=...)`` can be called; True where it cannot be told."""
    try:
        parameters = inspect.signature(getattr(cls, "no_sync", None)).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind is p.VAR_KEYWORD or (p.name == "defer" and p.kind in named) for p in parameters)


def has_full_master(cls: Callable[..., Any]) -> bool:
    """Whether the class has the optional method ``full_master()``: something else of this name is its own affair."""
    method = getattr(cls, "full_master", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C: it cannot be told
        pass
    return True


def _shown(args: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in args.items())


def _import_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    _importable(Path.cwd())
    _importable(path.parent)
    # A name of its own: a user's file called `random.py` or `harness.py` must not shadow or be shadowed.
    name = f"_subject_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _importable(directory: Path) -> None:
    # At the end: a file of the user beside his subject must not shadow an installed package.
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _last_place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"
