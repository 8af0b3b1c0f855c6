"""Names, messages and output of a case, a subject or a rank cannot write to the terminal or pass for the harness's."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from tests.cli.test_machine import CASE

if TYPE_CHECKING:
    import subprocess

    from tests.cli.conftest import InProcess

# An escape sequence in 7 and in 8 bits, a carriage return, a line that looks like a verdict, a bidirectional override,
# the markup of rich, a line separator, an invisible tag.
NASTY = "\x1b[2J\x9b31m\r\nholds: zero2 on gloo, all is well\n\u202egnp.exe[bold red]x[/]\u2028\u200b\U000e0041\x07\x00"
FILE_NASTY = NASTY.replace("\x00", "").replace("/", "").replace(":", "")

SUBJECT = f"""
import sys
from zero2core import ZeroMaster

class Broken(ZeroMaster):
    def reduce_scatter(self):
        print({NASTY!r}, flush=True)
        sys.stderr.write({NASTY!r})
        raise ValueError({NASTY!r})
"""


def check_clean(done: subprocess.CompletedProcess[str]) -> None:
    """Nothing but text that prints, and no verdict of somebody else's making: what they say is indented."""
    for text in (done.stdout, done.stderr):
        assert all(char.isprintable() or char == "\n" for char in text), text
        assert not any(line.startswith("holds") for line in text.splitlines())


def test_a_violation_with_nasty_names_everywhere(warm: InProcess) -> None:
    """In the subject's path, its output and its exception, the report's directory and the parameter; then replayed."""
    (warm.directory / FILE_NASTY).mkdir()
    (warm.directory / FILE_NASTY / f"{FILE_NASTY}.py").write_text(SUBJECT)
    subject = f"{FILE_NASTY}/{FILE_NASTY}.py:Broken"
    report = f"report{FILE_NASTY}"

    done = warm.run(
        "verify", "--subject", subject, "--world", "1", "--examples", "1", "--report", report, "--json", "-"
    )

    assert done.returncode == 1, done.stderr
    check_clean(done)
    result = json.loads(done.stdout)
    assert result["subject"] == subject
    assert "gnp.exe" in result["failure"]["output"]
    assert "gnp.exe" in done.stderr
    command = shlex.split(result["failure"]["replay"])
    assert command[:4] == ["python", "-m", "harness", "replay"]
    again = warm.run(*command[3:])
    assert again.returncode == 1
    check_clean(again)


def test_a_case_with_nasty_names(warm: InProcess) -> None:
    """It is refused, or its names are shown escaped, the first line of a replay included."""
    named = {**CASE, "parameters": [{"name": NASTY, "shape": [2, 3]}], "failure": {NASTY: NASTY}}
    (warm.directory / "named.json").write_text(json.dumps(named))
    (warm.directory / "twice.json").write_text(json.dumps({**named, "parameters": named["parameters"] * 2}))  # type: ignore[operator]
    (warm.directory / "field.json").write_text(json.dumps({**CASE, NASTY: 1}))
    (warm.directory / "subject.json").write_text(
        json.dumps({**CASE, "subject": {"given": NASTY, "absolute": f"{NASTY}.py:A"}})
    )
    (warm.directory / f"{FILE_NASTY}.json").write_text(json.dumps(CASE))
    (warm.directory / "sub.py").write_text(SUBJECT)

    for file, options, code in (
        ("twice.json", (), 2),
        ("field.json", (), 2),
        ("subject.json", (), 2),
        ("named.json", ("--subject", "sub.py:Broken"), 1),
        (f"{FILE_NASTY}.json", ("--subject", "sub.py:Broken"), 1),
    ):
        done = warm.run("replay", file, *options)
        assert done.returncode == code, done.stderr
        check_clean(done)
        if code == 2:
            assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_what_a_case_names_is_not_imported_from_elsewhere(warm: InProcess) -> None:
    """Importing runs code: a case that somebody sent may not have it done by naming a path or an installed module."""
    outside = warm.directory.parent / "outside.py"
    touch = f"import pathlib; pathlib.Path({str(warm.directory / 'imported')!r}).touch()\n"
    outside.write_text(touch)
    (warm.directory / "inside.py").write_text(touch)
    for absolute, said in (
        (f"{outside}:A", "outside.py:A' is not in the current directory"),
        ("../outside.py:A", "outside.py:A' is not in the current directory"),
        ("antigravity:A", "'antigravity:A' is not in the current directory"),
    ):
        case = {**CASE, "subject": {"given": "inside.py:A", "absolute": absolute}}
        (warm.directory / "case.json").write_text(json.dumps(case))
        done = warm.run("replay", "case.json")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
        assert "give --subject to say what to run" in done.stderr
        assert not (warm.directory / "imported").exists()

    case = {**CASE, "subject": {"given": "inside.py:A", "absolute": f"{warm.directory / 'inside.py'}:A"}}
    (warm.directory / "case.json").write_text(json.dumps(case))
    done = warm.run("replay", "case.json")
    assert done.returncode == 2  # it has no class A
    assert (warm.directory / "imported").exists()
