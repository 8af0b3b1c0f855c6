"""Ranks of one process share no module of the subject's, though each imports, and is imported, as if alone."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.subjects.copies import RankModules
from harness.subjects.load import METHODS, SubjectError, load_class

RIGHT = (
    "    def __init__(self, params, rank, world, bucket=1): self.master, self.has_grad, self.spills = params, 0, 0\n"
    + ("\n".join(f"    def {name}(self, *args): ..." for name in METHODS) + "\n")
)
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, empty; afterwards nothing of it, and of no other turn, is in sys.modules."""
    directory = tmp_path / "current"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield directory
    if RankModules._active is not None:
        RankModules._active.use(None)
    left = [name for name, module in sys.modules.items() if is_in(module, directory)]
    for name in left:
        del sys.modules[name]
    assert left == []


def is_in(module: object, directory: Path) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(str(directory))


@pytest.fixture
def write(directory: Path) -> Write:
    def write(name: str, source: str) -> Path:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    return write


def modules_of(subject: str) -> RankModules:
    return RankModules(subject, lambda: load_class(subject))


def built(modules: RankModules, rank: int) -> Any:
    return modules.load(rank)([], rank, 2)


def test_what_a_file_keeps_in_its_module_and_its_class_is_of_one_rank(write: Write) -> None:
    write("helper_of_copies.py", "CALLS = []\n")
    path = write(
        "subject.py",
        "import helper_of_copies\nSEEN = []\n"
        "class Zero:\n    count = 0\n" + RIGHT + "    def note(self, value):\n"
        "        SEEN.append(value); helper_of_copies.CALLS.append(value); Zero.count += 1\n"
        "        return list(SEEN), list(helper_of_copies.CALLS), Zero.count\n",
    )
    modules = modules_of(f"{path}:Zero")
    subjects = [built(modules, rank) for rank in range(3)]
    seen: dict[int, object] = {}
    for turn in (0, 1, 0, 2, 1, 0):
        modules.use(turn)
        seen[turn] = subjects[turn].note(turn)

    assert seen == {0: ([0] * 3, [0] * 3, 3), 1: ([1] * 2, [1] * 2, 2), 2: ([2], [2], 1)}
    assert modules.load(1) is type(subjects[1])
    assert modules.shared is None


@pytest.fixture
def package(write: Write) -> str:
    """With state in ``__init__``, relative imports, an import inside a function, and a dataclass."""
    write("copied/__init__.py", "registry = []\nfrom . import first\n")
    write("copied/first.py", "from . import registry\nregistry.append('first')\n")
    write("copied/part/__init__.py", "")
    write("copied/part/late.py", "from .. import registry\nregistry.append('late')\nOWN = []\n")
    write(
        "copied/zero.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "import copied.first\nfrom . import registry\nfrom .first import registry as same\n"
        "@dataclass\nclass Note:\n    value: int\n"
        "class Zero:\n" + RIGHT + "    def late(self):\n"
        "        import copied.part.late\n        from .part.late import OWN\n"
        "        assert same is registry is copied.registry\n"
        "        assert copied.part.late.OWN is OWN\n"
        "        return registry, OWN\n",
    )
    return "copied.zero:Zero"


def test_a_package_is_whole_in_each_ranks_turn(package: str) -> None:
    modules = modules_of(package)
    subjects = [built(modules, rank) for rank in range(2)]
    found: list[Any] = [None, None]
    for rank in (0, 1):
        modules.use(rank)
        found[rank] = subjects[rank].late()  # imports two modules more, each rank its own
    for rank in (0, 1):
        modules.use(rank)
        registry, own = subjects[rank].late()
        assert (registry, own) == (["first", "late"], [])
        assert (registry is found[rank][0], own is found[rank][1]) == (True, True)
        assert sys.modules["copied"].part.late is sys.modules["copied.part.late"]
        assert sys.modules["copied.zero"].Zero is type(subjects[rank])

    assert found[0][0] is not found[1][0]
    assert found[0][1] is not found[1][1]


def test_nothing_is_left_in_nobodys_turn_and_all_is_there_again_in_the_next(package: str) -> None:
    before = set(sys.modules)
    modules = modules_of(package)
    subject = built(modules, 0)
    subject.late()
    modules.use(None)

    assert set(sys.modules) - before == set()
    modules.use(0)
    assert {name for name in sys.modules if name.startswith("copied")} == {
        "copied", "copied.first", "copied.zero", "copied.part", "copied.part.late"
    }  # fmt: skip


def test_objects_are_pickled_by_name_in_each_ranks_turn(package: str) -> None:
    modules = modules_of(package)
    notes = []
    for rank in (0, 1):
        modules.load(rank)
        notes.append(sys.modules["copied.zero"].Note(rank))
    for rank in (0, 1):
        modules.use(rank)
        sent = pickle.dumps(notes[rank])
        modules.use(1 - rank)
        received = pickle.loads(sent)  # noqa: S301

        assert type(received) is type(notes[1 - rank]) is not type(notes[rank])
        assert received.value == rank


def test_what_was_installed_and_the_standard_library_are_shared(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    installed = write("site-packages/installed_of_copies.py", "")
    monkeypatch.syspath_prepend(str(installed.parent))
    path = write(
        "subject.py",
        "import installed_of_copies\nclass Zero:\n" + RIGHT + "    def late(self):\n        import colorsys\n",
    )
    modules = modules_of(f"{path}:Zero")
    found = []
    for rank in (0, 1):
        built(modules, rank).late()
        modules.use(1 - rank)  # what is the standard library's stays there
        found.append((sys.modules["installed_of_copies"], sys.modules["colorsys"]))
    modules.use(None)

    assert found[0][0] is found[1][0]
    assert found[0][1] is found[1][1]
    assert "colorsys" in sys.modules
    del sys.modules["installed_of_copies"]


@pytest.mark.parametrize("by_file", [False, True])
def test_an_installed_subject_is_copied_all_the_same(
    by_file: bool, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("site-packages/installed_of_copies.py", "class Zero:\n" + RIGHT)
    monkeypatch.syspath_prepend(str(path.parent))
    modules = modules_of(f"{path if by_file else path.stem}:Zero")

    assert modules.load(0) is not modules.load(1)


def test_a_module_that_a_rank_removes_stays_away_from_it_alone(write: Write) -> None:
    write("removed_of_copies.py", "")
    path = write("subject.py", "import removed_of_copies\nclass Zero:\n" + RIGHT)
    modules = modules_of(f"{path}:Zero")
    for rank in (0, 1):
        modules.load(rank)
    modules.use(0)
    del sys.modules["removed_of_copies"]

    found = []
    for rank in (1, 0, 1):
        modules.use(rank)
        found.append("removed_of_copies" in sys.modules)
    assert found == [True, False, True]


def test_a_module_that_can_be_imported_only_once_is_everybodys(write: Write) -> None:
    write(
        "once_of_copies.py",
        "import sys\nif hasattr(sys, '_once_of_copies'): raise RuntimeError('registered already')\n"
        "sys._once_of_copies = True\n",
    )
    write("before_once_of_copies.py", "")
    write("late_of_copies.py", "")
    path = write(
        "subject.py",
        "import before_once_of_copies, once_of_copies\nclass Zero:\n"
        + RIGHT
        + "    def late(self):\n        import once_of_copies, late_of_copies\n        return late_of_copies\n",
    )
    modules = modules_of(f"{path}:Zero")
    try:
        classes = [modules.load(rank) for rank in range(3)]
        late = []
        for rank in (2, 0, 1):
            modules.use(rank)
            late.append(classes[rank]([], rank, 3).late())
    finally:
        del sys._once_of_copies  # type: ignore[attr-defined]

    assert classes[0] is classes[1] is classes[2]
    assert late[0] is late[1] is late[2]
    assert modules.shared is not None
    assert modules.shared.startswith(f"all ranks share one copy of {path}:Zero: imported once more, ")
    assert "registered already" in modules.shared


def test_an_import_that_raises_for_the_first_rank_is_refused(write: Write) -> None:
    path = write("subject.py", "1 / 0\n")
    modules = modules_of(f"{path}:Zero")

    for _ in range(2):
        with pytest.raises(SubjectError, match="ZeroDivisionError"):
            modules.load(0)
    assert modules.shared is None


def test_built_in_systems_are_shared_without_a_word() -> None:
    modules = modules_of("zero2")

    assert modules.load(0) is modules.load(1)
    assert modules.shared is None


def test_what_the_harness_runs_on_is_shared_and_it_is_said() -> None:
    modules = RankModules("torch.optim:AdamW", lambda: sys.modules["torch"].optim.AdamW)

    assert modules.load(0) is modules.load(1)
    assert modules.shared == ("all ranks share one copy of torch.optim:AdamW: it is a part of what the harness runs on")


def test_a_module_that_puts_something_else_in_its_place_keeps_it(write: Write) -> None:
    write("replaced_of_copies.py", "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(seen=[])\n")
    path = write(
        "subject.py",
        "import sys, types\nimport replaced_of_copies\nclass Zero:\n" + RIGHT + "    def replace(self):\n"
        "        sys.modules['replaced_of_copies'] = self\n"
        "    def find(self):\n        import replaced_of_copies\n        return replaced_of_copies\n",
    )
    modules = modules_of(f"{path}:Zero")
    subjects = [built(modules, rank) for rank in (0, 1)]
    modules.use(0)
    subjects[0].replace()
    modules.use(1)
    assert subjects[1].find().seen == []
    modules.use(0)
    assert subjects[0].find() is subjects[0]


def test_what_goes_by_the_subjects_name_is_out_of_the_way_meanwhile(package: str) -> None:
    own = load_class(package)
    try:
        modules = modules_of(package)
        classes = [modules.load(rank) for rank in (0, 1)]
        modules.use(None)
        assert sys.modules["copied.zero"].Zero is own
    finally:
        for name in [name for name in sys.modules if name.startswith("copied")]:
            del sys.modules[name]

    assert len({own, *classes}) == 3


def test_one_subject_at_a_time(package: str, write: Write) -> None:
    """As in processes of their own, but they share no helper."""
    path = write("other.py", "from copied import registry\nclass Zero:\n    registry = registry\n" + RIGHT)
    one, other = modules_of(package), modules_of(f"{path}:Zero")
    registry = built(one, 0).late()[0]
    cls: Any = other.load(0)
    assert cls.registry is sys.modules["copied"].registry is not registry
    one.use(0)
    assert sys.modules["copied"].registry is registry


def test_each_import_is_made_in_what_is_given_for_its_rank(write: Write) -> None:
    path = write("subject.py", "import sys\nRANK = sys._rank_of_copies\nclass Zero:\n    RANK = RANK\n" + RIGHT)

    @contextmanager
    def importing(rank: int) -> Iterator[None]:
        sys._rank_of_copies = rank  # type: ignore[attr-defined]
        yield
        del sys._rank_of_copies  # type: ignore[attr-defined]

    modules = RankModules(f"{path}:Zero", lambda: load_class(f"{path}:Zero"), importing)
    classes: list[Any] = [modules.load(rank) for rank in (0, 1)]

    assert [cls.RANK for cls in classes] == [0, 1]
