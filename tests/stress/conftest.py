"""The command line as in tests/cli, and how much is tried."""

from __future__ import annotations

from tests.cli.conftest import cli, start
from tests.cli.test_fuzz import wrong
from tests.ranks.test_museum_campaign import broken

__all__ = ["broken", "cli", "start", "wrong"]
