"""Many campaigns at the same time in the same directory. ``STRESS_CAMPAIGNS`` changes how many."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from harness.scenario import codec
from tests.crowd import check_nothing_left, run_together
from tests.support import SUBJECTS

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

CAMPAIGNS = int(os.environ.get("STRESS_CAMPAIGNS", "20"))


@pytest.mark.timeout(3600)
def test_campaigns_at_once_all_hold(cli: CommandLine) -> None:
    done = run_together(cli, [("verify", "--world", "2", "--examples", "5")] * CAMPAIGNS)

    assert [(one.returncode, one.stderr if one.returncode else "") for one in done] == [(0, "")] * CAMPAIGNS
    check_nothing_left(cli)
    assert list(cli.directory.iterdir()) == []


@pytest.mark.timeout(3600)
def test_violations_found_at_once_are_all_saved_whole(cli: CommandLine) -> None:
    """Two of them save the same case, or two of one seed; each printed replay command works."""
    subject = f"{SUBJECTS}/broken.py:LostOffsetAtBucketEdge"
    lines = [
        ("verify", "--subject", subject, "--world", "1,2", "--seed", seed, "--json", f"{number}.json")
        for number, seed in enumerate(("7", "7", "8"))
    ]

    done = run_together(cli, lines)

    assert [one.returncode for one in done] == [1] * len(lines)
    check_nothing_left(cli)
    commands = []
    for number in range(len(lines)):
        failure = json.loads((cli.directory / f"{number}.json").read_text())["failure"]
        codec.load(cli.directory / failure["case"])
        commands.append(failure["replay"])
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "harness"]
        assert cli.command() == [sys.executable, *words[1:3]]
        assert cli.run(*words[3:]).returncode == 1
    check_nothing_left(cli)
