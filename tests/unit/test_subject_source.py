"""Where a subject comes from: every form that is taken, and one clear refusal for everything else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.drive.tasks import CheckSubject, SubjectName, decode_task, encode
from harness.errors import UsageError
from harness.subjects.builtin import BUILTIN
from harness.subjects.source import Scalar, SubjectSource, from_case, is_local, parse


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one: holds ``optimizer.py`` and, in a directory, ``my.models/zero.py``."""
    (tmp_path / "my.models").mkdir()
    for name in ("optimizer.py", "my.models/zero.py"):
        (tmp_path / name).write_text("raise RuntimeError('the parent must not import this')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_built_in_system_by_its_name(name: str) -> None:
    assert parse(name) == SubjectSource(name, name, {})


@pytest.mark.parametrize("given", ["package.module:Class", "module:Class", "a.b.c:_C1", "π:Ω", "optimizer:Zero"])
def test_a_class_in_a_module_is_taken_as_it_is(given: str) -> None:
    """Whether the module exists is for the ranks to see: the parent imports nothing."""
    assert parse(given) == SubjectSource(given, given, {})


@pytest.mark.parametrize("given", ["optimizer.py", "./optimizer.py", "my.models/zero.py", "my.models/../optimizer.py"])
def test_a_class_in_a_file_is_found_from_any_directory(
    given: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parse(f"{given}:Zero")
    monkeypatch.chdir("/")

    assert source.given == f"{given}:Zero"
    where, _, name = source.absolute.rpartition(":")
    assert name == "Zero"
    assert Path(where).is_absolute()
    assert Path(where).samefile(directory / given)
    assert parse(source.absolute).absolute == source.absolute


def test_a_file_in_the_home_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory))

    assert parse("~/optimizer.py:Zero") == SubjectSource("~/optimizer.py:Zero", f"{directory}/optimizer.py:Zero", {})


def test_a_colon_in_a_files_name_is_no_end_of_it(directory: Path) -> None:
    (directory / "a:b.py").write_text("")

    assert parse("a:b.py:Zero").absolute == f"{directory}/a:b.py:Zero"


def test_nothing_is_imported(directory: Path) -> None:
    before = set(sys.modules)
    parse("optimizer.py:Zero")
    parse("optimizer:Zero")

    assert set(sys.modules) == before


def test_arguments_are_kept_and_not_shared() -> None:
    args: dict[str, Scalar] = {"fast": True, "alpha": 0.5, "_name": "x", "none": None, "n": 3}
    source = parse("zero2", args)
    args["late"] = 1

    assert source.args == {"fast": True, "alpha": 0.5, "_name": "x", "none": None, "n": 3}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", "zero", "ZERO2", "zero2 ", "optimizer.py", "package.module", "./optimizer.py"])
def test_a_name_that_is_no_built_in_system(given: str) -> None:
    """What there is, and how a class is named, is told."""
    with pytest.raises(UsageError, match="no built-in system of that name") as refused:
        parse(given)

    assert repr(given) in str(refused.value)
    assert "zero2" in str(refused.value)
    assert "path/to/file.py:Class" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (":", ""),
        (":Zero", "Zero"),
        ("optimizer.py:", ""),
        ("module:", ""),
        ("optimizer.py:Outer.Inner", "Outer.Inner"),
        ("optimizer.py:Zero()", "Zero()"),
        ("optimizer.py:2", "2"),
        ("optimizer.py: Zero", " Zero"),
        ("module:class", "class"),
        ("module:None", "None"),
    ],
)
def test_a_class_name_that_is_none(given: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"expected package\.module:Class or path/to/file\.py:Class") as refused:
        parse(given)

    assert f"got class name {name!r}" in str(refused.value)


@pytest.mark.parametrize("given", ["missing.py", "my.models/missing.py", ".py", "optimizer.py/x.py", "a\0.py"])
def test_a_file_that_is_not_there(given: str, directory: Path) -> None:
    """Where it was looked for is told, as an absolute path."""
    with pytest.raises(UsageError, match="no such file") as refused:
        parse(f"{given}:Zero")

    assert str(directory) in str(refused.value)


def test_a_directory_whose_name_ends_like_a_file(directory: Path) -> None:
    (directory / "package.py").mkdir()

    with pytest.raises(UsageError, match=r"package\.py"):
        parse("package.py:Zero")


@pytest.mark.parametrize(
    "where",
    ["~nobody_of_this_name/zero.py", "n" * 300 + ".py", "d" * 5000 + "/zero.py"],
    ids=["an unknown user's home", "a name too long for a file", "a path too long"],
)
def test_a_path_that_cannot_be_looked_at(where: str) -> None:
    with pytest.raises(UsageError, match="--subject"):
        parse(f"{where}:Zero")


@pytest.mark.parametrize(
    "where",
    [
        "optimizer.pyc/x",
        "my.models/zero",
        "../x",
        "/tmp",
        "a..b",
        ".a",
        "a.",
        "a b",
        "a-b",
        "1a",
        "import",
        "a.class.b",
    ],
)
def test_what_is_neither_a_module_nor_a_python_file(where: str) -> None:
    with pytest.raises(UsageError, match="is neither a module name nor a path that ends in") as refused:
        parse(f"{where}:Zero")

    assert repr(where) in str(refused.value)


@pytest.mark.parametrize(
    "name", ["", "1x", "a-b", "a.b", "lambda", "None", "params", "rank", "world", "bucket", "self", "a b"]
)
def test_an_argument_that_a_constructor_cannot_take_besides(name: str) -> None:
    for given in ("zero2", "optimizer.py:Zero", "module:Zero"):
        with pytest.raises(UsageError, match="not a further keyword argument") as refused:
            parse(given, {"fine": 1, name: 2})
        assert f"--subject-arg {name}:" in str(refused.value)


def test_a_refusal_is_one_line() -> None:
    with pytest.raises(UsageError) as refused:
        parse("a\nb\x1b[31m:Zero")

    assert str(refused.value).isprintable()


def test_a_file_whose_name_is_no_text_is_refused_or_reaches_the_ranks() -> None:
    """Names of files are bytes: odd ones must not end in an encoding error once the ranks have been started."""
    os.close(os.open(b"odd\xff.py", os.O_CREAT | os.O_WRONLY))
    try:
        source = parse(os.fsdecode(b"odd\xff.py:Zero"))
    except UsageError:
        return
    task = CheckSubject(SubjectName(source.absolute, source.args))
    assert decode_task(encode(task)) == task


# --- what a case may name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["zero2", "optimizer.py:Zero", "./my.models/zero.py:Zero", "optimizer:Zero", "package.inner:Zero"]
)
def test_what_lies_in_the_current_directory_runs_by_itself(given: str, directory: Path) -> None:
    """What is found, not what is written, counts; nothing of it is imported here."""
    (directory / "package").mkdir()
    (directory / "package" / "inner.py").write_text("raise RuntimeError('the parent must not import this')\n")

    source = parse(given)

    assert from_case(source.given, source.absolute, {"a": 1}) == SubjectSource(given, source.absolute, {"a": 1})
    assert "package" not in sys.modules


@pytest.mark.parametrize(
    "absolute",
    [
        "{outside}/evil.py:Zero",
        "{inside}/../outside/evil.py:Zero",
        "../outside/evil.py:Zero",
        "{inside}/link.py:Zero",
        "linked:Zero",
        "site.main:Zero",
        "torch.optim:AdamW",
        "builtins:dict",
        "nowhere:Zero",
    ],
)
def test_what_lies_elsewhere_does_not_run_because_a_case_says_so(
    absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by its path, nor by way of a link, nor as a module that happens to be installed."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for path in (inside, outside):
        path.mkdir()
    (outside / "evil.py").write_text("")
    (inside / "link.py").symlink_to(outside / "evil.py")
    (inside / "linked").symlink_to(outside, target_is_directory=True)
    monkeypatch.chdir(inside)
    named = absolute.format(inside=inside, outside=outside)

    assert not is_local(parse(named))
    with pytest.raises(UsageError, match="not in the current directory"):
        from_case("zero2", named, {})


def test_packages_of_an_environment_in_the_current_directory_are_not_the_users_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a project with its ``.venv``: everything that is installed would else lie in the current directory."""
    assert is_local(parse("optimizer:Zero"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(directory))
    assert not is_local(parse("optimizer:Zero"))


@pytest.mark.parametrize("given", ["zero2", "my.models/zero.py:Zero", "no such thing", "", "a\nb"])
def test_another_name_than_that_of_what_runs_is_not_shown(given: str, directory: Path) -> None:
    """A case cannot have one thing run and another reported."""
    absolute = f"{directory / 'optimizer.py'}:Zero"

    assert from_case(given, absolute, {}).given == absolute


def test_an_exhibit_of_the_museum_is_found_by_its_id_and_by_its_class() -> None:
    found = [parse(f"museum:{name}") for name in ("max-of-norms", "MaxOfNorms")]
    assert [each.given for each in found] == ["museum:max-of-norms", "museum:MaxOfNorms"]
    assert {each.absolute for each in found} == {found[0].absolute}
    assert found[0].absolute.endswith("plants/norm.py:MaxOfNorms")


@pytest.mark.parametrize(
    ("name", "hint"), [("max-of-norm", "did you mean max-of-norms"), ("12", "`museum --list` shows them")]
)
def test_an_exhibit_that_is_none_is_said_at_once(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        parse(f"museum:{name}")


def test_a_module_of_the_users_called_museum_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "museum.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert parse("museum:Mine").absolute == "museum:Mine"
