"""What goes where: the summary, the JSON, the progress, and the exit code, over a runner of known outcome."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.support import paired, sampled

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess


@pytest.mark.parametrize(("outcome", "code"), [("holds", 0), ("violated", 1), ("unknown", 3)])
def test_exit_code_and_json_agree(inside: InProcess, outcome: str, code: int) -> None:
    """With ``--json -`` stdout is one JSON value; the summary a person reads is on stderr."""
    done = inside.run("verify", "--json", "-", "--seed", "7", canned=outcome)
    assert done.returncode == code
    result = json.loads(done.stdout)
    assert (result["verdict"], result["seed"], result["worlds"]) == (outcome, 7, [1, 2, 3, 4])
    assert f"{outcome}: zero2 on gloo" in done.stderr


def test_the_seed_is_printed_first_and_the_replay_command_last(inside: InProcess) -> None:
    """A drawn seed can be given back; without ``--json`` results are on stdout."""
    done = inside.run("verify", canned="violated")
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "seed"
    assert f"seed {int(lines[0].split()[1])}" in lines[1]
    assert lines[-1] == "  replay       again"
    assert done.stderr == ""


def test_seeds_differ_from_run_to_run(inside: InProcess) -> None:
    """The same default seed for everyone would explore the same scenarios for ever."""
    first, second = (inside.run("verify", canned="holds").stdout.splitlines()[0] for _ in range(2))
    assert first != second


def test_options_reach_the_runner(inside: InProcess) -> None:
    """Worlds keep their order, a bucket and a number of examples are passed on."""
    done = inside.run("verify", "--world", "3,1", "--examples", "5", "--json", "-", canned="holds")
    result = json.loads(done.stdout)
    assert result["worlds"] == [3, 1]
    assert result["examples"]["run"] == 5


def test_defaults_of_examples(inside: InProcess) -> None:
    """300 drawn scenarios; with the parameters of a model three."""
    (inside.directory / "model.json").write_text('[{"name": "w", "shape": [4, 8]}]')
    runs = [
        json.loads(inside.run("verify", *options, "--json", "-", canned="holds").stdout)["examples"]["run"]
        for options in ((), ("--params", "model.json"))
    ]
    assert runs == [300, 3]


def test_json_file_replaces_the_old_one(inside: InProcess) -> None:
    """A file of an earlier run is replaced as a whole, nothing else is left beside it."""
    target = inside.directory / "result.json"
    target.write_text("x" * 100_000)
    done = inside.run("verify", "--json", "result.json", canned="violated")
    assert done.returncode == 1
    written = json.loads(target.read_text())
    assert written["failure"]["actual"] == "nan"
    assert [path.name for path in inside.directory.iterdir()] == ["result.json"]


def test_json_to_a_link_keeps_the_link(inside: InProcess) -> None:
    """What it points to is replaced."""
    target = inside.directory / "real.json"
    (inside.directory / "link.json").symlink_to(target)
    assert inside.run("verify", "--json", "link.json", canned="holds").returncode == 0
    assert (inside.directory / "link.json").is_symlink()
    assert json.loads(target.read_text())["verdict"] == "holds"


def test_json_to_a_named_pipe_is_written_into_it(cli: CommandLine) -> None:
    """What is no ordinary file must not be replaced by one: for root that could be /dev/null."""
    script = 'mkfifo pipe; timeout 20 cat pipe >got & "$@"; code=$?; wait; test -p pipe && exit "$code"; exit 99'
    assert cli.shell(script, "verify", "--json", "pipe", canned="violated").returncode == 1
    assert json.loads((cli.directory / "got").read_text())["verdict"] == "violated"


def test_a_result_that_cannot_be_written_after_all(cli: CommandLine) -> None:
    """A full disk turns "holds" into 3, but does not hide a violation."""
    holds = cli.shell('"$@" >/dev/full', "verify", "--json", "-", canned="holds")
    violated = cli.shell('"$@" >/dev/full', "verify", "--json", "-", canned="violated")
    assert (holds.returncode, violated.returncode) == (3, 1)
    assert "the result could not be written: No space left on device" in holds.stderr


def test_json_stdout_is_kept_clean_of_other_prints(cli: CommandLine) -> None:
    """Whoever prints, this process or one it starts, prints to stderr."""
    done = cli.run("verify", "--json", "-", canned="chatty")
    assert json.loads(done.stdout)["verdict"] == "holds"
    assert "printed by this process" in done.stderr
    assert "printed by a child" in done.stderr


@pytest.mark.parametrize(
    "redirection",
    sampled(["| true", "2>&1 | true", ">&-", "2>&-", ">/dev/full", "2>/dev/full", "</dev/null >&- 2>&-"], every=2),
)
@pytest.mark.parametrize(("outcome", "code"), sampled([("violated", 1), ("holds", 0)], every=2))
def test_nobody_reading_does_not_change_the_exit_code(
    cli: CommandLine, redirection: str, outcome: str, code: int
) -> None:
    """The verdict is the same whether anybody looks or not."""
    done = cli.shell(f'"$@" {redirection}; exit "${{PIPESTATUS[0]}}"', "verify", canned=outcome)
    assert done.returncode == code


@pytest.mark.parametrize("args", sampled(["--help", "list", "verify --help", "--version"], every=2))
def test_nobody_reading_a_listing_is_no_violation(cli: CommandLine, args: str) -> None:
    """Exit code 1 has one meaning; click gives it to every broken pipe."""
    done = cli.shell('"$@" | true; exit "${PIPESTATUS[0]}"', *args.split())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_subject_that_ranks_refuse_is_bad_input(inside: InProcess) -> None:
    """Only the ranks can import it; still it is exit 2 and one line."""
    done = inside.run("verify", "--json", "-", canned="bad_subject")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: my.py:Zero2 lacks `collect`"


def test_an_internal_error_is_unknown_and_keeps_its_traceback(inside: InProcess) -> None:
    """Never exit 1, no traceback on the terminal; the result says where it lies."""
    done = inside.run("verify", "--json", "-", canned="bug")
    assert done.returncode == 3
    result = json.loads(done.stdout)
    [traceback] = inside.temporary.iterdir()
    assert result["verdict"] == "unknown"
    assert result["reason"].startswith("internal error: KeyError: ")
    assert str(traceback) in result["reason"]
    assert "Traceback" in traceback.read_text()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "outcome"), paired([signal.SIGINT, signal.SIGTERM], ["waits", "waits_blindly"]))
def test_an_interruption_writes_the_partial_result(
    start: Callable[..., subprocess.Popen[str]], outcome: str, number: signal.Signals
) -> None:
    """Ctrl-C and `kill` end with 130 and a result that says so, whether or not the runner caught it."""
    process = start("verify", "--json", "-", canned=outcome)
    assert process.stderr is not None
    assert any(line.startswith("0/1 examples") for line in process.stderr)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    result = json.loads(printed)
    assert process.returncode == 130
    assert (result["verdict"], result["interrupted"]) == ("unknown", True)


def test_replay_takes_the_subject_from_the_case_unless_told_otherwise(cli: CommandLine) -> None:
    """The absolute path is what counts, and is shown; arguments of the command line come on top."""
    subject = cli.directory / "sub.py"
    subject.write_text("raise SystemExit('the parent never imports a subject')")
    case = {**CASE, "subject": {"given": "x/sub.py:A", "absolute": f"{subject}:A", "args": {"a": 1, "b": 2}}}
    (cli.directory / "case.json").write_text(json.dumps(case))
    own = cli.run("replay", "case.json", "--subject-arg", "b=false", canned="holds")
    other = cli.run("replay", "case.json", "--subject", "zero2", canned="violated")
    assert own.returncode == 0
    assert f"replay of case.json: seed 5 on SubjectSource(given='{subject}:A', absolute='{subject}:A'" in own.stderr
    assert "args={'a': 1, 'b': False}" in own.stderr
    assert other.returncode == 1
    assert "on SubjectSource(given='zero2', absolute='zero2', args={})" in other.stderr


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
