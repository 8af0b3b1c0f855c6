"""The test that is printed after a failure: what it says is the case, whatever the case names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.report.paste import LARGEST_INLINE, pytest_test
from harness.scenario import codec
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.subjects.source import Scalar

NASTY = "'''\"\"\"\\'{x}\n\x1b[2J\u202e\x7fé\U0001f600\x00"


def case(*parameters: Parameter) -> codec.Case:
    scenario = Scenario(
        world=1,
        seed=3,
        parameters=parameters,
        values=Values(Domain.EXACT, 7, 0),
        optimizer=AdamW(),
        operations=(Build(4), Part(False, (0,), (tuple(range(0, len(parameters), 2)),)), Step()),
    )
    return codec.Case(scenario, codec.SubjectReference("zero2", "zero2"), {"property": "weights"})


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, dict[str, Any]]:
    """The test's name, the case that it checks, and how."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("harness.checking.check_case", lambda case, **keywords: calls.append((case, keywords)))
    names: dict[str, Any] = {}
    exec(compile(ast.parse(text), "pasted", "exec"), names)
    [name] = [name for name in names if name.startswith("test_")]
    names[name]()
    [(given, keywords)] = calls
    return name, given, keywords


@pytest.mark.parametrize("name", ["w", NASTY, "'" * 7, "\\", "\\'"])
def test_it_holds_the_whole_case_whatever_it_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = case(Parameter(name, (2,)))
    text = pytest_test(wanted, Path("cases/case-12ab.json"), "zero.py:Zero", {}, {"backend": "sim"})
    assert text is not None
    assert all(char.isascii() and (char.isprintable() or char == "\n") for char in text)

    title, given, keywords = run(text, monkeypatch)

    assert title == "test_case_12ab"
    assert codec.decode(given.encode()) == codec.Case(wanted.scenario)
    assert keywords == {"subject": "zero.py:Zero", "backend": "sim"}


def test_it_holds_how_the_class_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    args: dict[str, Scalar] = {"overlap": True, "name": NASTY, "none": None, "scale": 0.5}
    text = pytest_test(case(Parameter("w", (2,))), None, NASTY, args, {"backend": "gloo", "stall_s": 2.5})
    assert text is not None

    title, _, keywords = run(text, monkeypatch)

    assert title == "test_case"
    assert keywords == {"subject": NASTY, "subject_args": args, "backend": "gloo", "stall_s": 2.5}


def test_a_large_case_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    large = case(*(Parameter(f"parameter.{index}", (3,)) for index in range(LARGEST_INLINE // 20)))
    path = Path("a dir") / "it's.json"
    text = pytest_test(large, path, "zero2", {}, {})
    assert text is not None

    title, given, _ = run(text, monkeypatch)

    assert len(text) < 300
    assert (title, given) == ("test_it_s", str(path))
    assert pytest_test(large, None, "zero2", {}, {}) is None


def test_a_configuration_stays_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"use_fsdp": True, "shard": 2, "name": "it's"}
    failed = case(Parameter("w", (2,)))
    named = msgspec.structs.replace(failed, subject=codec.SubjectReference("strategy", "strategy", {}, config))
    text = pytest_test(named, None, "strategy", {}, {})
    assert text is not None
    assert run(text, monkeypatch)[2] == {"subject": "strategy", "config": config}
