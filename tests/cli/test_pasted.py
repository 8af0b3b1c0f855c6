"""The test that a failure prints, pasted into a file, is red on the class that failed, green on one that is right."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from harness.report.console import failure_lines
from tests.support import SUBJECTS

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine
    from tests.support import Campaigns

WRONG, RIGHT = "broken.py:LostFirstPart", "museum:plain-zero"


def test_it_fails_until_the_class_is_right(cli: CommandLine, campaigns: Campaigns) -> None:
    """Copied from what is printed, with nothing else in the directory: the case is in the test."""
    failure = campaigns.run(WRONG, worlds=(1, 2), examples=50, shrink_s=10.0).failure
    assert failure is not None
    assert failure.test is not None
    printed = failure_lines(failure)
    start = next(index for index, line in enumerate(printed) if line.startswith("  test  ")) + 1
    assert printed[-1].startswith("  replay  ")
    pasted = "\n".join(printed[start:-1])
    assert pasted.strip() == failure.test.strip()
    (cli.directory / "test_wrong.py").write_text(pasted)
    (cli.directory / "test_right.py").write_text(pasted.replace(f"{SUBJECTS}/{WRONG}", RIGHT))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=cli.directory,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "FAILED test_wrong.py::test_case_" in done.stdout
    assert f"AssertionError: violated: {SUBJECTS}/{WRONG} on gloo, world " in done.stdout
    assert "property     spill" in done.stdout
    assert list(cli.temporary.glob("zero2*")) == []
