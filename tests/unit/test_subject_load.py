"""Importing a subject's class: every way in which it can be no subject is one clear sentence for its author."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.subjects.builtin import BUILTIN, CLASS_SUBJECT, Capabilities, capabilities
from harness.subjects.load import (
    METHODS,
    MUON_METHODS,
    SubjectError,
    declared,
    has_full_master,
    load_class,
    missing_attributes,
    system_of,
)

SUBJECTS = Path(__file__).parent.parent / "subjects"

RIGHT = """
class Zero:
    def __init__(self, params, rank, world, bucket=2**25):
        self.master, self.has_grad, self.spills = params, False, 0

    def collect(self, more): ...
    def reduce_scatter(self): ...
    def grad_sq_norm(self): ...
    def discard(self): ...
    def gather_params(self): ...
"""

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, empty; what a test imports from it is forgotten again."""
    directory = tmp_path / "current"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield directory
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


@pytest.fixture
def write(directory: Path) -> Write:
    def write(source: str, name: str = "subject.py") -> Path:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    return write


def refusal(subject: str, **args: object) -> str:
    with pytest.raises(SubjectError) as refused:
        load_class(subject, args)
    return str(refused.value)


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_system_has_the_interface_it_is_driven_by(name: str) -> None:
    cls = load_class(name)

    assert BUILTIN[name].target == f"{cls.__module__}:{cls.__qualname__}"
    assert capabilities(name) is BUILTIN[name].capabilities


def test_a_class_of_the_users_is_asked_for_no_more_than_the_contract() -> None:
    assert capabilities("zero2core.zero_master:ZeroMaster") is CLASS_SUBJECT
    assert Capabilities("fp32", traffic=False, static_memory=False, strict_padding_rule=False) == CLASS_SUBJECT


def test_a_class_in_a_file(write: Write) -> None:
    path = write(RIGHT)

    cls = load_class(f"{path}:Zero")

    assert cls.__name__ == "Zero"
    assert missing_attributes(cls([], 0, 1)) == []


def test_a_class_in_a_module_of_the_current_directory(write: Write) -> None:
    write(RIGHT, "package_of_this_test/zero.py")

    assert load_class("package_of_this_test.zero:Zero").__module__ == "package_of_this_test.zero"


def test_a_file_may_import_what_lies_beside_it_and_in_the_current_directory(write: Write) -> None:
    write("FIRST = 1\n", "beside/helper_beside_of_this_test.py")
    write("SECOND = 2\n", "helper_here_of_this_test.py")
    imports = "import helper_beside_of_this_test, helper_here_of_this_test\n"
    path = write(imports + RIGHT, "beside/subject.py")

    assert load_class(f"{path}:Zero").__name__ == "Zero"


@pytest.mark.parametrize("name", ["random.py", "harness.py", "torch.py", "my-subject v2.py", "2.py"])
def test_a_files_name_neither_hides_a_module_nor_is_hidden_by_one(name: str, write: Write) -> None:
    path = write("import random\nimport harness\nimport torch\nVALUE = random.random()\n" + RIGHT, name)

    cls = load_class(f"{path}:Zero")

    assert sys.modules[cls.__module__].VALUE < 1
    assert sys.modules["random"] is random
    import harness

    assert harness.__file__ != str(path)


def test_what_lies_beside_a_file_does_not_hide_installed_modules(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that nothing has imported yet, with a namesake beside the subject and in the current directory."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    write("raise RuntimeError('planted')\n", "colorsys.py")
    write("raise RuntimeError('planted')\n", "beside/colorsys.py")
    path = write("from colorsys import rgb_to_hsv\n" + RIGHT, "beside/subject.py")

    assert load_class(f"{path}:Zero").__name__ == "Zero"


def test_files_of_one_name_in_two_directories_are_two_modules(write: Write) -> None:
    first = write(RIGHT + "    which = 1\n", "one/zero.py")
    second = write(RIGHT + "    which = 2\n", "two/zero.py")

    classes = [load_class(f"{path}:Zero") for path in (first, second, first)]

    assert [cls.which for cls in classes] == [1, 2, 1]  # type: ignore[attr-defined]


def test_a_file_is_a_module_like_any_other(write: Write) -> None:
    """Dataclasses with text annotations, and pickle, look their module up by its name."""
    source = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Cut:\n    start: int\n"
    )
    path = write(source + RIGHT)

    cls = load_class(f"{path}:Zero")

    assert sys.modules[cls.__module__].Zero is cls


# --- what does not import ---------------------------------------------------------------------------------------------


def test_a_file_that_raises_is_told_with_the_error_and_its_line(write: Write) -> None:
    path = write("\n\nraise RuntimeError('planted: not importable')\n")

    assert refusal(f"{path}:Zero") == (f"cannot import {path}: RuntimeError: planted: not importable ({path}, line 3)")


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)\n", "import sys\nsys.exit('bye')\n", "raise SystemExit\n"])
def test_a_file_that_exits_is_refused_whatever_its_code(source: str, write: Write) -> None:
    text = refusal(f"{write(source)}:Zero")

    assert "cannot import" in text
    assert "SystemExit" in text


def test_a_file_that_raises_what_is_no_exception_is_refused(write: Write) -> None:
    path = write("class Odd(BaseException):\n    pass\nraise Odd('planted')\n")

    assert "Odd: planted" in refusal(f"{path}:Zero")


def test_ranks_see_no_ctrl_c_so_an_interrupt_is_the_subjects(write: Write) -> None:
    path = write("raise KeyboardInterrupt\n")

    assert "KeyboardInterrupt" in refusal(f"{path}:Zero")


def test_a_syntax_error_is_told_with_its_line(write: Write) -> None:
    path = write("class Zero:\n    pass\n\n\ndef broken(:\n    pass\n")

    text = refusal(f"{path}:Zero")

    assert f"cannot import {path}: SyntaxError: " in text
    assert "line 5" in text


def test_a_note_on_the_error_does_not_hide_it(write: Write) -> None:
    path = write("error = ValueError('planted')\nerror.add_note('see the manual')\nraise error\n")

    assert "ValueError: planted" in refusal(f"{path}:Zero")


@pytest.mark.parametrize("data", [b"x = '\xff'\n", b"\0", b"\x7fELF"])
def test_a_file_that_is_no_source_is_refused(data: bytes, directory: Path) -> None:
    path = directory / "subject.py"
    path.write_bytes(data)

    assert f"cannot import {path}: " in refusal(f"{path}:Zero")


def test_a_file_that_went_away_is_refused(directory: Path) -> None:
    assert f"cannot import {directory}/gone.py: FileNotFoundError" in refusal(f"{directory}/gone.py:Zero")


def test_a_module_that_does_not_exist_is_refused_with_its_name() -> None:
    text = refusal("no_module_of_this_name.zero:Zero")

    assert text.startswith("cannot import no_module_of_this_name.zero: ModuleNotFoundError: ")
    assert "'no_module_of_this_name'" in text


def test_a_missing_import_of_the_subjects_own_is_told_with_the_place(write: Write) -> None:
    path = write("import math\nimport no_module_of_this_name\n")

    text = refusal(f"{path}:Zero")

    assert "No module named 'no_module_of_this_name'" in text
    assert text.endswith(f"({path}, line 2)")


def test_a_file_that_failed_can_be_loaded_once_it_is_mended(write: Write) -> None:
    path = write("raise RuntimeError('planted')\n")
    refusal(f"{path}:Zero")
    # Of another length: a compiled file is taken for current by size and time.
    path.write_text(RIGHT)

    assert load_class(f"{path}:Zero").__name__ == "Zero"


# --- what has no such class -------------------------------------------------------------------------------------------


def test_a_missing_class_is_refused_with_those_that_are_there(write: Write) -> None:
    path = write("import dataclasses\nclass Second: ...\nclass First: ...\nvalue = 3\n")

    assert refusal(f"{path}:Zero") == f"{path} has no class 'Zero' (it has: First, Second)"


def test_a_file_without_classes_says_so(write: Write) -> None:
    path = write("value = 3\n")

    assert refusal(f"{path}:Zero") == f"{path} has no class 'Zero' (it has: none)"


@pytest.mark.parametrize(("value", "kind"), [("3", "int"), ("lambda *args: None", "function"), ("None", "NoneType")])
def test_what_is_no_class_is_refused_with_what_it_is(value: str, kind: str, write: Write) -> None:
    path = write(f"Zero = {value}\n")

    assert refusal(f"{path}:Zero") == f"{path}:Zero is no class but {kind}"


def test_a_module_that_imports_its_classes_when_asked_may_fail_then(write: Write) -> None:
    """Large packages load their classes lazily (PEP 562), and raise ImportError for what is not installed."""
    path = write("def __getattr__(name):\n    raise ImportError(f'planted: {name} needs another package')\n")

    assert "planted: Zero needs another package" in refusal(f"{path}:Zero")


# --- what lacks the interface -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_each_missing_method_is_named(method: str, write: Write) -> None:
    path = write(RIGHT.replace(f"def {method}(", f"def not_{method}("))

    text = refusal(f"{path}:Zero")

    assert text.startswith(f"{path}:Zero lacks the interface of ZeroMaster: no method {method} (needed: ")
    assert all(needed in text for needed in METHODS)


def test_all_missing_methods_are_named_at_once(write: Write) -> None:
    path = write("class Zero:\n    def __init__(self, params, rank, world, bucket=1): ...\n    discard = 3\n")

    assert f"no method {', '.join(METHODS)} (" in refusal(f"{path}:Zero")


MUON = "class Muon:\n    def __init__(self, inner, group=None, config=None): ...\n" + "".join(
    f"    def {method}(self, *args): ...\n" for method in MUON_METHODS
)


def test_what_kind_of_system_a_class_is_shows_in_its_methods(write: Write) -> None:
    zero, muon = load_class(f"{write(RIGHT)}:Zero"), load_class(f"{write(MUON, 'muon.py')}:Muon")

    assert (system_of(zero), system_of(muon)) == ("zero_master", "muon")
    assert {name: system_of(load_class(name)) for name in BUILTIN} == {
        name: builtin.system for name, builtin in BUILTIN.items()
    }


@pytest.mark.parametrize("method", ["no_sync", "clear_param_storage", "state_dict", "load_state_dict"])
def test_each_missing_method_of_a_muon_class_is_named(method: str, write: Write) -> None:
    path = write(MUON.replace(f"def {method}(", f"def not_{method}("))

    assert f"lacks a part of the interface of MuonShardingOptimizer: no method {method} (" in refusal(f"{path}:Muon")


def test_a_class_that_is_nearly_one_of_muon_is_told_what_that_would_take(write: Write) -> None:
    nearly = write(MUON.replace("def step(", "def not_step("))
    both = write(MUON + "    def collect(self, more): ...\n", "both.py")

    assert refusal(f"{nearly}:Muon").endswith("To be taken for a MuonShardingOptimizer it lacks step")
    assert refusal(f"{both}:Muon").endswith("taken for no MuonShardingOptimizer since it has a method collect")


def test_the_signature_of_a_muon_class_is_checked(write: Write) -> None:
    path = write(MUON.replace(", config=None", ""))

    assert "cannot be constructed as Class(inner, group=..., config=...):" in refusal(f"{path}:Muon")


def test_a_method_may_be_inherited_or_of_any_kind(write: Write) -> None:
    child = "class Child(Zero):\n    discard = staticmethod(lambda: None)\n    collect = classmethod(print)\n"

    assert load_class(f"{write(RIGHT + child)}:Child").__name__ == "Child"


def with_signature(signature: str) -> str:
    return RIGHT.replace("self, params, rank, world, bucket=2**25", signature).replace("= params, False", "= 1, False")


@pytest.mark.parametrize(
    "signature",
    [
        "self, params, rank, world, bucket",
        "self, params, rank, world, *, bucket",
        "self, a, b, c, bucket=1, other=None",
        "self, *args, **kwargs",
        "self, params, rank, world, **kwargs",
        "self, params, /, rank, world, bucket",
    ],
)
def test_a_constructor_that_can_be_called_so_is_taken(signature: str, write: Write) -> None:
    assert load_class(f"{write(with_signature(signature))}:Zero").__name__ == "Zero"


@pytest.mark.parametrize(
    "signature",
    [
        "self, params, rank, world",
        "self, params, rank, bucket=1",
        "self, params, rank, world, extra, bucket=1",
        "self, params, rank, world, bucket, *, extra",
        "self, params, rank, world, bucket, /",
        "self, bucket, params, rank, world=1",
        "self, *, params, rank, world, bucket",
        "self",
    ],
)
def test_a_constructor_that_cannot_be_called_so_is_refused_unconstructed(signature: str, write: Write) -> None:
    path = write(with_signature(signature))

    text = refusal(f"{path}:Zero")

    assert text.startswith(f"{path}:Zero cannot be constructed as Class(params, rank, world, bucket=...): ")
    assert "its signature is (" in text


def test_further_arguments_are_bound_by_name(write: Write) -> None:
    path = write(with_signature("self, params, rank, world, bucket=1, *, factor, name='x'"))

    assert load_class(f"{path}:Zero", {"factor": 2}).__name__ == "Zero"
    assert load_class(f"{path}:Zero", {"factor": 2, "name": "y"}).__name__ == "Zero"
    assert "missing a required argument: 'factor'" in refusal(f"{path}:Zero", name="y")
    unknown = refusal(f"{path}:Zero", factor=2, colour="red")
    assert "bucket=..., factor=2, colour='red')" in unknown
    assert "'colour'" in unknown


def test_a_class_that_shows_no_signature_is_left_to_its_construction(write: Write) -> None:
    path = write(RIGHT + "    __signature__ = 3\n")

    assert load_class(f"{path}:Zero").__name__ == "Zero"


def test_the_test_suites_own_subjects_are_judged_as_their_docstrings_say() -> None:
    unusual = SUBJECTS / "unusual.py"

    assert "no method discard" in refusal(f"{unusual}:LacksDiscard")
    assert "cannot be constructed" in refusal(f"{unusual}:NoBucketArgument")
    assert "factor" in refusal(f"{unusual}:NeedsFactor")
    assert load_class(f"{unusual}:NeedsFactor", {"factor": 2}).__name__ == "NeedsFactor"
    assert refusal(f"{unusual}:NOT_A_CLASS").endswith("is no class but int")


# --- attributes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", [["master"], ["has_grad"], ["spills"], ["master", "spills"]])
def test_attributes_that_a_built_object_lacks_are_named(lacking: list[str]) -> None:
    class Built:
        master = has_grad = spills = None

    for name in lacking:
        delattr(Built, name)

    assert missing_attributes(Built()) == lacking


class _WithFullMaster:
    def full_master(self) -> None: ...


class _OfAnotherMeaning:
    def full_master(self, path: str) -> None: ...


class _SetToNone:
    full_master = None


@pytest.mark.parametrize(
    ("cls", "has"), [(_WithFullMaster, True), (_OfAnotherMeaning, False), (_SetToNone, False), (object, False)]
)
def test_full_master_is_a_method_without_arguments_or_absent(cls: type, has: bool) -> None:
    assert has_full_master(cls) == has


# --- what a class declares


class _Declares:
    verify_extensions: object = ("strides", "dtypes")


def test_what_a_class_declares_is_read_in_a_fixed_order() -> None:
    assert declared(_Declares) == ("dtypes", "strides")
    assert declared(object) == ()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("dtypes", "stride"), "names 'stride', which is no extension (there are: refresh, dtypes, strides)"),
        ("dtypes", "must be names of refresh, dtypes, strides, it is str"),
        ((1,), "must be names of refresh, dtypes, strides, it is tuple"),
        (("refresh",), "names 'refresh', but there is no method refresh_from_weights"),
    ],
)
def test_a_wrong_declaration_is_told(names: object, problem: str) -> None:
    wrong = type("Wrong", (), {"verify_extensions": names})
    with pytest.raises(SubjectError, match=re.escape(problem)):
        declared(wrong)


class _Strategy:
    verify_extensions = ("deferred",)

    def wrap(self, model: object) -> object: ...
    def clip_grad_norm(self, model: object, max_norm: float) -> object: ...
    def no_sync(self, model: object) -> object: ...


def test_deferring_is_declared_where_no_sync_can_be_told_to() -> None:
    class Named(_Strategy):
        @contextlib.contextmanager
        def no_sync(self, model: object, *, defer: str = "gradients") -> Iterator[None]:
            yield

    class Any(_Strategy):
        def no_sync(self, model: object, **options: object) -> object: ...

    assert declared(Named) == declared(Any) == ("deferred",)
    with pytest.raises(SubjectError, match=r"names 'deferred', but no_sync has no parameter defer: .*all_reduce"):
        declared(_Strategy)
