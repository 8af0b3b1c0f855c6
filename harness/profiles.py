"""Settings profiles of Hypothesis for tests that use ``@given`` or a state machine. No torch.

``dev``: few examples, at a desk. ``ci``: more, and nothing is lost: what failed is kept in a directory that can be
taken from one run to the next, and how to repeat it is printed (Hypothesis' own profile of this name drops its database
and draws the same examples every time). ``fuzz``: many. ``debug``: few, and every step is printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase

NAMES: Final = ("dev", "ci", "fuzz", "debug")
DATABASE: Final = Path(".hypothesis") / "examples"
"""Where Hypothesis keeps what failed, unless told otherwise."""

_EXAMPLES: Final = {"dev": 50, "ci": 100, "fuzz": 2000, "debug": 10}


def register(database: Path = DATABASE) -> None:
    """Make the profiles known to Hypothesis; ``database``: the directory in which it keeps what failed."""
    for name in NAMES:
        settings.register_profile(
            name,
            max_examples=_EXAMPLES[name],
            derandomize=False,
            database=DirectoryBasedExampleDatabase(database),
            print_blob=True,
            verbosity=Verbosity.verbose if name == "debug" else Verbosity.normal,
            # How long an example takes says how busy the machine is.
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )


def chosen() -> str:
    """The profile that the environment asks for: ``HYPOTHESIS_PROFILE``, else ``ci`` where ``CI`` is set, else ``dev``.

    Raises:
        ValueError: there is none of this name.
    """
    name = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
    if name not in NAMES:
        raise ValueError(f"HYPOTHESIS_PROFILE: expected one of {', '.join(NAMES)}, got {name!r}")
    return name


def load(name: str | None = None, database: Path = DATABASE) -> None:
    """Register all profiles and make one the default: the chosen one, where none is named."""
    register(database)
    settings.load_profile(chosen() if name is None else name)
