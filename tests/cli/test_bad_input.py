"""Every mistake of the user is one line on stderr and exit code 2, before anything runs and without a trace left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess

# The command line, and what its line must say. FILE is a file, DIRECTORY a directory, in the working directory.
BAD = [
    ("", "no verb given"),
    ("frob", "No such command 'frob'"),
    ("verify --frob", "No such option '--frob'"),
    ("verify FILE", "unexpected extra argument (FILE)"),
    ("verify --world", "Option '--world' requires an argument"),
    *(
        (f"verify --world {worlds}", "is not a world size")
        for worlds in ("0", "x", "1,,2", "257", "-1", "1.5", "٣", "1,")
    ),
    ("verify --world 1,2,01", "world 1 is given twice"),
    ("verify --examples 0", "0 is not a whole number from 1"),
    ("verify --examples x", "'x' is not a valid integer"),
    *((f"verify --seconds {seconds}", "not a number of seconds above zero") for seconds in ("0", "-1", "nan", "inf")),
    ("verify --seconds x", "'x' is not a valid float"),
    ("verify --timeout 0", "not a number of seconds above zero"),
    ("verify --seed -1", "-1 is not a whole number from 0"),
    (f"verify --seed {2**63}", "is not a whole number from 0"),
    ("verify --bucket 0", "0 is not a whole number from 1"),
    ("verify --backend mpi", "'mpi' is not one of 'gloo', 'nccl', 'sim'"),
    ("verify --order tree", "--order tree: gloo leaves no such choice; add --backend sim"),
    ("verify --order ring", "--order ring: gloo leaves no such choice; add --backend sim"),
    ("verify --schedule lockstep --backend nccl", "--schedule lockstep: nccl leaves no such choice; add --backend sim"),
    ("verify --backend sim --order heap", "'heap' is not one of 'ring', 'rank', 'tree', 'random'"),
    ("verify --backend sim --schedule late", "'late' is not one of 'lockstep', 'random'"),
    ("verify --backend sim --world 257", "is not a world size"),
    ("replay good.json --order tree", "--order tree: gloo leaves no such choice; add --backend sim"),
    ("soak --backend nccl", "'nccl' is not one of 'gloo', 'sim'"),
    ("soak --backend sim --order tree", "No such option '--order'"),
    ("train --backend sim", "No such option '--backend'"),
    ("doctor --backend sim", "'sim' is not one of 'gloo', 'nccl'"),
    ("verify --backend nccl --world 100", "--backend nccl: "),
    ("verify --preset nope", "nope"),
    ("verify --preset gpt2 --params FILE", "--preset and --params"),
    ("verify --params missing.json", "missing.json: no such file"),
    ("verify --params DIRECTORY", "DIRECTORY: expected a JSON file, got a directory"),
    ("verify --params FILE", "FILE: expected JSON"),
    ("verify --params shapeless.json", "shapeless.json: $[0]"),
    ("verify --subject nope", "'nope': no built-in system of that name (there are: "),
    ("verify --subject missing.py:Zero2", "no such file"),
    ("verify --subject FILE:1a", "got class name '1a'"),
    ("verify --subject-arg overlap", "'overlap': expected name=value"),
    ("verify --subject-arg =1", "'=1': expected name=value"),
    ("verify --subject-arg a=1 --subject-arg a=2", "--subject-arg a: given twice"),
    ("verify --subject-arg world=3", "--subject-arg world: "),
    (f"verify --subject-arg a={2**64}", "does not fit 64 bits"),
    ("verify --report FILE", "--report FILE: "),
    ("verify --report FILE/deeper", "--report FILE/deeper: cannot make the directory"),
    ("verify --json DIRECTORY", "'DIRECTORY': expected a file, got a directory"),
    ("verify --json missing/result.json", "'missing/result.json': cannot write it: No such file or directory"),
    ("verify --json FILE/result.json", "'FILE/result.json': cannot write it: Not a directory"),
    ("verify --json /proc/result.json", "'/proc/result.json': cannot write it"),
    ("replay", "Missing argument 'FILE'"),
    ("replay missing.json", "missing.json: no such file"),
    ("replay DIRECTORY", "DIRECTORY: expected a JSON file, got a directory"),
    ("replay FILE", "FILE: expected JSON"),
    ("replay future.json", "future.json: $.version: written by a newer version"),
    ("replay strange.json", "strange.json: $: "),
    ("replay lost.json", "lost.json: the case's own subject: "),
    ("replay lost.json --subject nope", "'nope': no built-in system of that name"),
    ("list FILE", "unexpected extra argument (FILE)"),
    ("list --json DIRECTORY", "'DIRECTORY': expected a file, got a directory"),
    ("train --world 65", "65 is not a whole number from 1 to 64"),
    ("train --steps 0", "0 is not a whole number from 1"),
    ("train --text missing.txt", "missing.txt"),
    ("doctor --world 1", "world 1: the order of addition is measured at 2 to 8 ranks"),
    ("doctor --world 9", "world 9: the order of addition is measured at 2 to 8 ranks"),
    ("doctor --device tpu", "'tpu' is not one of 'cpu', 'cuda'"),
    ("verify --backend nccl --device cpu", "--device cpu: nccl moves tensors of GPUs only"),
    ("replay good.json --backend nccl --device cpu", "--device cpu: nccl moves tensors of GPUs only"),
    ("train --optimizer adam", "'adam' is not one of 'zero2', 'muon'"),
    ("train --optimizer muon --subject zero2", "--optimizer muon and --subject zero2 both say what to train with"),
    ("train --subject nope", "'nope': no built-in system of that name"),
]

CASE = {
    "version": 1,
    "system": "zero_master",
    "world": 1,
    "seed": 5,
    "parameters": [{"name": "w", "shape": [2, 3]}],
    "values": {"domain": "exact", "max_k": 3, "exponent": 0},
    "optimizer": {},
    "operations": [
        {"op": "build", "bucket": 4},
        {"op": "part", "more": False, "contributors": [0], "none": [[]]},
        {"op": "step"},
    ],
}

FILES = {
    "FILE": "no JSON",
    "good.json": json.dumps(CASE),
    "shapeless.json": json.dumps([{"name": "w"}]),
    "future.json": json.dumps({**CASE, "version": 2}),
    "strange.json": json.dumps({**CASE, "frob": 1}),
    "lost.json": json.dumps({**CASE, "subject": {"given": "a.py:A", "absolute": "/nowhere/a.py:A"}}),
}


@pytest.fixture
def work(inside: InProcess) -> Path:
    for name, content in FILES.items():
        (inside.directory / name).write_text(content)
    (inside.directory / "DIRECTORY").mkdir()
    return inside.directory


@pytest.mark.parametrize(("line", "said"), BAD, ids=[line or "nothing" for line, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(inside: InProcess, work: Path, line: str, said: str) -> None:
    """The line names what is wrong; stdout stays empty; no file appears, not even for cases or tracebacks."""
    before = sorted(work.iterdir())
    done = inside.run(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert sorted(work.iterdir()) == before
    assert list(inside.temporary.iterdir()) == []


def test_a_hostile_file_name_cannot_write_to_the_terminal(cli: CommandLine) -> None:
    """Escape sequences and line breaks of an argument come back escaped, on one line."""
    done = cli.run("verify", "--world", "\x1b[2J\n1")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_undecodable_argument(cli: CommandLine) -> None:
    """A byte that is no text is an ordinary bad file name."""
    done = cli.shell("\"$@\" $'\\xff.json'", "replay")
    assert done.returncode == 2
    assert "\\udcff.json: no such file" in done.stderr


def test_json_to_closed_stdout_is_refused_before_the_run(cli: CommandLine) -> None:
    """The result would go nowhere."""
    done = cli.shell('"$@" >&-', "verify", "--json", "-", canned="holds")
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr
