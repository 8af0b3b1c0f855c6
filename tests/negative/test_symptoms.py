"""A named symptom is the right one: over classes whose mistake is known in these words, or is none of them.

The table of all is printed at the end (``-s``). A part of them runs, with FULL_TABLE=1 (`make stress`) all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.diagnosis.symptoms import named_by
from tests.subjects.symptom_table import BROKEN, JUDGED, KNOWN
from tests.support import Campaigns, sampled

EXAMPLES = 150
SHRINK_S = 1.0


class Table:
    """What came of each class: a line, and whether a symptom was named where there is one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.named: list[bool] = []


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Printed when all have run. Who never names anything is never wrong: most symptoms must have been named."""
    of_all = Table()
    yield of_all
    print("", *of_all.lines, sep="\n")  # noqa: T201 (the table is what it is for)
    assert 2 * sum(of_all.named) >= len(of_all.named)


@pytest.mark.parametrize("name", sampled(KNOWN, 9))
def test_a_symptom_is_right_or_not_named(name: str, simulated: Campaigns, table: Table) -> None:
    _judge(f"symptoms.py:{name}", KNOWN[name], simulated, table)


@pytest.mark.parametrize("name", sampled(BROKEN, 15))
def test_so_it_is_for_the_broken_classes(name: str, simulated: Campaigns, table: Table) -> None:
    _judge(f"broken.py:{name}", BROKEN[name], simulated, table)


@pytest.mark.parametrize("name", sampled(JUDGED, 9))
def test_so_it_is_for_mistakes_as_people_made_them(name: str, simulated: Campaigns, table: Table) -> None:
    _judge(f"judged.py:{name}", JUDGED[name], simulated, table)


def _judge(subject: str, right: frozenset[str], simulated: Campaigns, table: Table) -> None:
    worlds = (3,) if "AtWorldThree" in subject else (1,) if "AtWorldOne" in subject else (1, 2, 3, 4)
    result = simulated.run(subject, worlds=worlds, examples=EXAMPLES, shrink_s=SHRINK_S)

    failure = result.failure
    assert failure is not None, result.reason
    named = None if failure.symptom is None else named_by(failure.symptom)
    table.lines.append(f"{subject:40} {failure.property:10} {failure.stage or '':8} {failure.symptom or '-'}")
    assert named is None or named.name in right, (failure.symptom, failure.pattern)
    if right:
        table.named.append(named is not None)
