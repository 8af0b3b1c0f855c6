"""What exists, and how it is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from harness.faults.museum.catalogue import CONTROLS, PLANTS
from harness.scenario.muon_situations import MuonSituation
from harness.scenario.situations import Situation
from harness.scenario.strategy_situations import StrategySituation
from harness.verdict import Property

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, InProcess

VERBS = {
    "verify": "--subject --subject-arg --config --world --backend --order --schedule --examples --seconds --seed "
    "--preset --params --bucket --report --json --events --timeout",
    "replay": "--subject --subject-arg --config --backend --order --schedule --json --events --timeout",
    "train": "--subject --subject-arg --optimizer --world --steps --text --seed --json",
    "doctor": "--world --backend --json",
    "bench": "--subject --subject-arg --world --examples --seed --json",
    "soak": "--subject --subject-arg --world --backend --examples --every --seconds --seed --report --json --timeout",
    "fuzz": "--subject --subject-arg --config --world --backend --minutes --examples --workers --seed "
    "--hypothesis-seed --dir --fresh --keep-going --merge --report --json --events --timeout --stall",
    "museum": "--plant --show --list --backend --all --no-controls --seconds-per-plant --workers --seed "
    "--report --json --events",
    "report": "--html --markdown --junit",
    "list": "--plan --preset --world --json",
    "strategies": "--world --markdown --seed --json",
}


def test_the_main_help_names_every_verb_and_the_exit_codes(cli: CommandLine) -> None:
    """What a user sees first."""
    done = cli.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)
    assert "130  interrupted" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_its_options_with_an_example(inside: InProcess, verb: str) -> None:
    """Complete: every option, one example, the exit codes."""
    done = inside.run(verb, "--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in VERBS[verb].split())
    assert f"zero2-harness {verb}" in done.stdout
    assert "Exit codes:" in done.stdout


def test_version(cli: CommandLine) -> None:
    done = cli.run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("zero2-harness ")


def test_list_shows_all_there_is_and_json_the_same(inside: InProcess) -> None:
    """Names for --subject and --preset, and the words that results use."""
    shown, listed = inside.run("list"), json.loads(inside.run("list", "--json", "-").stdout)
    assert set(listed) == {
        "subjects",
        "presets",
        "properties",
        "situations",
        "situations of muon",
        "situations of strategy",
        "museum",
        "plants",
        "controls",
        "left_out",
    }
    assert "zero2" in listed["subjects"]
    assert "gpt2" in listed["presets"]
    assert list(listed["properties"]) == [item.value for item in Property]
    assert listed["situations"] == [item.value for item in Situation]
    assert listed["situations of muon"] == [item.value for item in MuonSituation]
    assert listed["situations of strategy"] == [item.value for item in StrategySituation]
    assert listed["museum"]["plants"].startswith(f"{len(PLANTS)} planted bugs")
    assert listed["museum"]["controls"].startswith(f"{len(CONTROLS)} classes")
    assert list(listed["plants"]) == [plant.id for plant in PLANTS]
    assert list(listed["controls"]) == [control.id for control in CONTROLS]
    assert listed["plants"][PLANTS[0].id]["bugs"] == list(PLANTS[0].bugs)
    assert shown.returncode == 0
    titles = ("subjects", "presets", "properties", "situations", "situations of muon", "situations of strategy")
    for title in (*titles, "museum"):
        assert all(f"\n  {name}" in shown.stdout for name in listed[title])
    assert shown.stdout.splitlines()[-3] == "museum:"  # `museum --list` has the names


def test_the_plan_is_near_the_best_that_whole_matrices_allow(cli: CommandLine) -> None:
    """What the project promises of GPT-2 124M and Qwen2.5-0.5B; the original rule, beside it, leaves ranks idle."""
    done = cli.run("list", "--plan", "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    found = {(row["preset"], row["world"], row["rule"]): row for row in json.loads(done.stdout)["balances"]}
    assert len(found) == 8
    for preset in ("gpt2", "qwen2.5-0.5b"):
        for world in (8, 64):
            ours, original = found[preset, world, "newton_schulz"], found[preset, world, "numel"]
            assert ours["cost"] <= (1.0 if world == 8 else 1.1) * ours["lower_bound"]
            assert original["cost"] > 1.1 * original["lower_bound"]
            assert (original["lower_bound"], original["elements"]) == (ours["lower_bound"], ours["elements"])
            assert ours["idle"] == max(0, world - ours["matrices"]) < original["idle"]


def test_another_plan_is_printed_beside_the_original_rules(cli: CommandLine) -> None:
    done = cli.run("list", "--plan", "--preset", "tiny-gpt", "--world", "2,4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "every 2-D matrix but embeddings and the output head" in done.stdout
    assert "tiny-gpt: 8 matrices, 6,144 elements" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "(default)" in line or "(original)" in line]
    assert [row[:2] for row in rows] == [[world, rule] for world in "24" for rule in ("newton_schulz", "numel")]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--world", "8"), "add --plan"),
        (("--preset", "gpt2"), "add --plan"),
        (("--plan", "--preset", "gpt-2"), "no preset 'gpt-2'"),
        (("--plan", "--world", "0"), "not a world size"),
    ],
)
def test_a_plan_of_what_is_not_there_is_refused(inside: InProcess, args: tuple[str, ...], says: str) -> None:
    done = inside.run("list", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_the_process_of_the_command_line_imports_no_torch() -> None:
    """It would cost more than a second, and the parent must stay free of whatever torch starts."""
    modules = {
        "verify": "harness.runner, harness.subjects.source, harness.scenario.presets",
        "replay": "harness.runner, harness.scenario.codec",
        "train": "harness.train.campaign, harness.train.show",
        "doctor": "harness.doctor.examination, harness.doctor.show",
        "bench": "harness.bench.campaign, harness.bench.show, harness.bench.muon.campaign, harness.bench.muon.show",
        "soak": "harness.soak.campaign, harness.soak.show",
        "fuzz": "harness.fuzz.campaign, harness.fuzz.show, harness.fuzz.worker",
        "museum": "harness.museum.campaign, harness.museum.show, harness.museum.selection, harness.museum.worker",
        "list": "harness.scenario.presets, harness.scenario.situations, harness.subjects.builtin, "
        "harness.balance.owners",
        "strategies": "harness.cells.campaign, harness.cells.show",
        "report": "harness.report.page, harness.report.markdown, harness.report.junit, harness.recording",
    }
    assert modules.keys() == VERBS.keys()
    told = "print({verb!r}) if 'torch' in sys.modules else None"
    program = [
        "import sys, harness.cli",
        *(f"import {each}; {told.format(verb=verb)}" for verb, each in modules.items()),
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []  # else the first of these verbs is to blame
