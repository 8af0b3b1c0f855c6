"""Hold workflows, actions, Dockerfiles and constraints against the Makefile and pyproject.toml: part of ``make lint``.

``python -m ci.check``: a line for each thing that is wrong; exit code 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ci import pin_rules, workflow_rules


def complaints(root: Path) -> list[str]:
    """What is wrong in the repository at ``root``, a line each."""
    makefile = (root / "Makefile").read_text()
    targets = targets_of(makefile)
    files, found = workflow_rules.load(root)
    return [
        *found,
        *workflow_rules.complaints(files, targets, variables_of(makefile)),
        *pin_rules.constraints(root),
        *pin_rules.matrix(root, files),
        *pin_rules.dockerfiles(root, targets),
        *pin_rules.scripts(root),
    ]


def targets_of(makefile: str) -> frozenset[str]:
    """The targets that ``make help`` lists: those with a text behind ``##``."""
    return frozenset(re.findall(r"(?m)^([a-z-]+):.*## ", makefile))


def variables_of(makefile: str) -> frozenset[str]:
    """The variables whose values it uses, in capital letters."""
    return frozenset(re.findall(r"(?:\$\(|\$\(or \$\(|^ifdef )([A-Z_]+)", makefile, re.MULTILINE))


def main() -> int:
    """Print what is wrong; the exit code."""
    found = complaints(Path(__file__).parents[1])
    for line in found:
        print(line)
    if not found:
        print("workflows, actions, Dockerfiles and constraints: nothing to complain of")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
