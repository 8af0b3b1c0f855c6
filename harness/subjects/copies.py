"""A subject's modules once for each rank, where the ranks of a world share a process.

A class may keep a counter in its class, a list in its module. In a process of its own each rank has that for itself;
here each rank gets its own copy of every module that is the subject's. Whose turn it is decides which copies are in
``sys.modules``, where imports, also those inside functions, and pickle look.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from harness.errors import exception_text
from harness.subjects.builtin import BUILTIN
from harness.subjects.load import SubjectError

_OURS = sys.stdlib_module_names | {"harness", "zero2core", "torch", "numpy", "__main__", "__mp_main__"}
_PACKAGE_DIRECTORIES = {"site-packages", "dist-packages"}
_FILE_PREFIX = "_subject_"  # of a subject that is a file; see load_class


class RankModules:
    """The copies of one subject's modules.

    A module is the subject's own if its top-level package is that of the subject, or lies where a user's own code does:
    neither in the standard library nor among installed packages. All others, and built-in systems, which keep no state
    in modules or classes, the ranks share. One object at a time has its modules in ``sys.modules``.

    Attributes:
        shared: Why all ranks have one copy in spite of all; None while each has its own.
    """

    _active: ClassVar[RankModules | None] = None

    def __init__(
        self,
        subject: str,
        load: Callable[[], type],
        importing: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Nothing is imported yet.

        Args:
            subject: As :func:`harness.subjects.load.load_class` takes it.
            load: Imports the class and checks it.
            importing: Gives what is entered around each import, for a rank.
        """
        self.shared: str | None = None
        self._subject = subject
        self._load = load
        self._importing = importing or (lambda rank: nullcontext())
        self._classes: dict[int, type] = {}
        self._copies: dict[int, dict[str, ModuleType]] = {}  # by rank, and by name
        self._first: int | None = None  # the rank for which it was imported first
        self._turn: dict[str, ModuleType] | None = None  # the copies that are in sys.modules
        self._hidden: dict[str, ModuleType] = {}  # what else goes by the name of the subject's package
        self._num_modules = 0  # in sys.modules, since somebody looked
        self._known: set[str] = set()  # names in it that are not the subject's
        root = subject.rpartition(":")[0].partition(".")[0]  # of a built-in system or a file: the name of no module
        self._root = None if root in _OURS else root
        self._roots: dict[str, bool] = {}

    def load(self, rank: int) -> type:
        """The class as this rank has it, imported when it is first asked for; afterwards this rank has its turn.

        Raises:
            harness.subjects.load.SubjectError: of the first import; if only a later one raises, the first copy is
                everybody's, and :attr:`shared` says why.
        """
        if rank not in self._classes:
            self._classes[rank] = self._import(rank)
        self.use(rank)
        return self._classes[rank]

    def use(self, rank: int | None) -> None:
        """Have this rank's copies in ``sys.modules`` from now on; None: nobody's, as before the first import.

        Modules of the subject's own that were imported since the last call belong to the rank that had its turn.
        """
        copies = None if rank is None else self._copies_of(rank)
        if copies is self._turn:
            return
        if self._turn is None:
            self._enter()
        else:
            self._collect(self._turn)
            if copies is None or self._turn.keys() != copies.keys():
                for name in self._turn:
                    sys.modules.pop(name, None)
        self._turn = copies
        if copies is None:
            self._exit()
        else:
            sys.modules.update(copies)
            self._num_modules = len(sys.modules)

    def _copies_of(self, rank: int) -> dict[str, ModuleType]:
        """Of a rank for which nothing was imported: an empty set of its own, or the first one if that is shared."""
        if rank not in self._copies and self.shared is not None and self._first is not None:
            return self._copies[self._first]
        return self._copies.setdefault(rank, {})

    def _import(self, rank: int) -> type:
        if self.shared is not None and self._first is not None:
            return self._classes[self._first]
        self.use(rank)
        try:
            with self._importing(rank):
                cls = self._load()
        except SubjectError as error:
            if self._first is None:
                raise
            # What is left of it is of no use to anybody.
            self.use(None)
            del self._copies[rank]
            self.shared = f"all ranks share one copy of {self._subject}: imported once more, {exception_text(error)}"
            return self._classes[self._first]
        if self._first is None:
            self._first = rank
            self._collect(self._copies[rank])
            if not self._copies[rank] and self._subject not in BUILTIN:
                self.shared = f"all ranks share one copy of {self._subject}: it is a part of what the harness runs on"
        return cls

    def _enter(self) -> None:
        if RankModules._active is not None:
            RankModules._active.use(None)
        RankModules._active = self
        if self._root in sys.modules:
            names = [name for name in sys.modules if name.partition(".")[0] == self._root]
            self._hidden = {name: sys.modules.pop(name) for name in names}
        self._known = set(sys.modules)

    def _exit(self) -> None:
        sys.modules.update(self._hidden)
        self._hidden = {}
        RankModules._active = None

    def _collect(self, copies: dict[str, ModuleType]) -> None:
        """Add to a rank's copies what it has imported in its turn, and note what it has put in a module's place."""
        for name in copies:
            if name in sys.modules:  # one that replaced itself, or was reloaded
                copies[name] = sys.modules[name]
        if len(sys.modules) == self._num_modules:
            return
        for name in [name for name in copies if name not in sys.modules]:
            del copies[name]
        for name in sys.modules.keys() - self._known - copies.keys():
            if self._is_own(name):
                copies[name] = sys.modules[name]
            else:
                self._known.add(name)
        self._num_modules = len(sys.modules)

    def _is_own(self, name: str) -> bool:
        """A matter of the top-level package, so that a package and its submodules are always copied together."""
        root = name.partition(".")[0]
        if root not in self._roots:
            self._roots[root] = root == self._root or root.startswith(_FILE_PREFIX) or _is_users(root)
        return self._roots[root]


def _is_users(root: str) -> bool:
    """Whether a top-level module, which has been imported, lies where a user's own code does."""
    module = sys.modules.get(root)
    if root in _OURS or module is None:
        return False
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))  # of a package without __init__.py
    if not places:  # something that was put in a module's place; or made by hand, which is found nowhere
        spec = PathFinder.find_spec(root)
        places = [spec.origin] if spec is not None else []
    return any(not _is_installed(Path(place)) for place in places if isinstance(place, str))


def _is_installed(path: Path) -> bool:
    return bool(_PACKAGE_DIRECTORIES.intersection(path.parts)) or any(path.is_relative_to(place) for place in _places())


def _places() -> list[Path]:
    """The standard library's; and what lies beside torch and numpy was installed with them, wherever that is."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "numpy")]
    beside = [Path(spec.origin).parent.parent for spec in specs if spec is not None and spec.origin is not None]
    return [*beside, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
