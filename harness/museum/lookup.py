"""What is known of the exhibits, for people who look one up: no campaign is run. No torch."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from harness.faults.museum import catalogue
from harness.faults.museum.exhibit import Control, Plant
from harness.report.console import count, describe
from harness.scenario.model import System

LINE_CHARS: Final = 80

_LABEL_CHARS: Final = 12


def exhibit_lines(exhibit: Plant | Control) -> list[str]:
    """All that its label says."""
    if isinstance(exhibit, Control):
        return [
            f"{exhibit.id} (control: right, in another way)",
            *_row("way", exhibit.way),
            *_row("class", _class(exhibit), wrapped=False),
            *_row("label", _near(_label_of(exhibit)), wrapped=False),
            *_row("subject", exhibit.subject, wrapped=False),
        ]
    symptoms = sorted(symptom.value for symptom in exhibit.symptoms)
    return [
        f"{exhibit.id} (plant: {exhibit.kind.value})",
        *_row("why", exhibit.why),
        *itertools.chain.from_iterable(
            _row("" if number else "bugs", bug_address(bug), wrapped=False) for number, bug in enumerate(exhibit.bugs)
        ),
        *([] if exhibit.bugs else _row("bugs", "none is public: the specification of its system names the mistake")),
        *_row("class", _class(exhibit), wrapped=False),
        *_row("label", _near(_labels() / f"{exhibit.module}.py"), wrapped=False),
        *_row("property", " or ".join(sorted(each.value for each in exhibit.properties))),
        *_row("stage", " or ".join(sorted(each.value for each in exhibit.stages))),
        *_row("symptom", " or ".join(symptoms) or "none: naming one is wrong"),
        *_row("known", describe(exhibit.known)),
        *_row("subject", exhibit.subject, wrapped=False),
    ]


def listing_lines(system: System | None = None) -> list[str]:
    """All exhibits, or those of one system: plants by kind, each with its public bugs, then the controls."""
    listed = [plant for plant in catalogue.PLANTS if system in (None, plant.system)]
    controls = [control for control in catalogue.CONTROLS if system in (None, control.system)]
    bugs = {bug for plant in listed for bug in plant.bugs}
    lines = [f"{count(len(listed), 'plant')}, for {count(len(bugs), 'public bug')}"]
    for kind, plants in itertools.groupby(sorted(listed, key=_kind), _kind):
        lines += ["", f"{kind}:"]
        for plant in plants:
            lines += _entry(plant.id, plant.bugs)
    lines += ["", f"{count(len(controls), 'control')}, right in another way:"]
    for control in controls:
        lines += [f"  {control.id}", *_wrap(control.way, "      ")]
    if system is not None:
        return lines
    lines += ["", f"{count(len(catalogue.LEFT_OUT), 'more public bug')}, of which no plant was made:"]
    for bug, why in catalogue.LEFT_OUT.items():
        lines += [f"  {bug}", *_wrap(why, "      ")]
    return lines


def bug_address(bug: str) -> str:
    """Where ``owner/repository#number`` is; GitHub leads on from there, should it be a pull request."""
    repository, _, number = bug.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def _kind(plant: Plant) -> str:
    return plant.kind.value


def _entry(name: str, bugs: Sequence[str]) -> Iterable[str]:
    whole = f"  {name}  {', '.join(bugs)}".rstrip()
    return [whole] if len(whole) <= LINE_CHARS else [f"  {name}", *_wrap(", ".join(bugs), "      ")]


def _row(label: str, text: str, *, wrapped: bool = True) -> list[str]:
    """A labelled text; what is to be copied stays in one line."""
    indent = f"  {'':<{_LABEL_CHARS}} "
    lines = _wrap(text, indent) if wrapped else [f"{indent}{text}"]
    return [f"  {label:<{_LABEL_CHARS}} {lines[0].strip()}", *lines[1:]]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, LINE_CHARS, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _class(exhibit: Plant | Control) -> str:
    file, _, name = exhibit.target.rpartition(":")
    return f"{_near(Path(file))}:{name}"


def _labels() -> Path:
    return Path(catalogue.__file__).parent / "labels"


def _label_of(control: Control) -> Path:
    """Classes of several modules may have their labels in one."""
    own = _labels() / f"{control.module}.py"
    return own if own.exists() else _labels() / "controls.py"


def _near(path: Path) -> str:
    """As seen from where the user is, if it lies beneath."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
