"""Campaigns at the same time in the same directory do not disturb each other. ``make stress`` starts twenty."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.crowd import check_nothing_left, run_together

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def test_campaigns_at_once(cli: CommandLine) -> None:
    done = run_together(cli, [("verify", "--world", "2", "--examples", "2")] * 2)

    assert [(one.returncode, one.stderr if one.returncode else "") for one in done] == [(0, "")] * 2
    check_nothing_left(cli)
    assert list(cli.directory.iterdir()) == []
