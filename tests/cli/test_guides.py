"""What README and the tutorial show is what comes of it: their classes and commands, run on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import InProcess

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "verify-your-optimizer.md"
LABEL = re.compile(r"[a-z]+ {2,}\S")


def _python(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)


def test_the_class_of_the_tutorial_holds_and_what_breaks_it_is_told_as_it_says(warm: InProcess) -> None:
    right, good, bad = _python(TUTORIAL)[:3]
    assert right.count(good) == 1
    file = warm.directory / "my_zero.py"
    verify = ("verify", "--subject", "my_zero.py:MyZero", "--world", "1,2,3", "--examples", "12", "--seed", "1")
    file.write_text(right)
    held = warm.run(*verify)
    assert held.returncode == 0, held.stdout

    (warm.directory / "broken.py").write_text(right.replace(good, bad))
    broken = warm.run(*(word.replace("my_zero", "broken") for word in verify))
    assert broken.returncode == 1
    for line in (
        "  property     weights",
        "  stage        gather",
        "  inputs       agreed: the master was right before the gather",
        "  scenario     world 2, 1 parameter of 3, bucket 1, 1 step (1 parts), exact",
    ):
        assert f"\n{line}\n" in broken.stdout
        assert f"\n{line}\n" in TUTORIAL.read_text()

    [case] = (warm.directory / "zero2-harness-cases").glob("*.json")
    replayed = warm.run("replay", str(case), "--subject", "my_zero.py:MyZero")
    assert replayed.returncode == 0, replayed.stdout


def test_the_failure_in_the_readme_is_the_one_that_is_reported(warm: InProcess) -> None:
    """Each line of the table that does not depend on time or place stands in the report."""
    section = (ROOT / "README.md").read_text().split("\n## A failure, line by line\n")[1].split("\n## ")[0]
    command = re.search(r"^\$ zero2-harness (.+)$", section, re.M)
    assert command is not None
    cells = [code for row in re.findall(r"^\| (`.+?`) \|", section, re.M) for code in re.findall(r"`([^`]+)`", row)]
    varies = ("case", "test", "replay")
    lines = [code for code in cells if LABEL.match(code) and not code.startswith(varies)]
    assert len(lines) > 12

    done = warm.run(*command[1].split())
    assert done.returncode == 1
    assert [line for line in lines if f"\n  {line.removesuffix('...').rstrip()}" not in done.stdout] == []
