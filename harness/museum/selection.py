"""Which exhibits a command line means. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from harness.errors import UsageError
from harness.faults.museum import catalogue
from harness.faults.museum.exhibit import PREFIX, Control, Plant
from harness.scenario.model import System

_MOST_SHOWN: Final = 3

_URL: Final = re.compile(r"(?:https?://)?(?:www\.)?github\.com/([^/]+)/([^/]+)/(?:issues|pull)/(\d+)(?:[/?#].*)?")


@dataclass(frozen=True)
class Selection:
    """What to run; ``simulated_only``: plants that were asked for, and that real ranks cannot show."""

    plants: tuple[Plant, ...]
    controls: tuple[Control, ...] = ()
    simulated_only: tuple[Plant, ...] = ()


def select(
    names: Sequence[str], *, backend: str, everything: bool, controls: bool, system: System | None = None
) -> Selection:
    """The plants and the controls to run, in the order of the catalogue.

    Args:
        names: of plants (ids, classes, public bugs), which are run alone; empty: all, on real ranks those that need
            processes.
        backend: of the ranks.
        everything: all plants on real ranks too, but for those that only a simulated world shows.
        controls: whether the controls are run, unless plants are named.
        system: only exhibits of this kind of system, unless plants are named; None: of every kind.

    Raises:
        UsageError: no plant has such a name, or ``everything`` is asked for where nothing else is run.
    """
    if everything and backend == "sim":
        raise UsageError("--all: on sim every plant is run anyway; give it with --backend gloo or nccl")
    if names and system is not None:
        raise UsageError("--system: plants that are named are of the system that they are of; give one or the other")
    if names:
        wanted = {plant.id for name in names for plant in _plants(name)}
        return Selection(tuple(plant for plant in catalogue.PLANTS if plant.id in wanted))
    plants = tuple(plant for plant in catalogue.PLANTS if system in (None, plant.system))
    shown = tuple(each for each in catalogue.CONTROLS if system in (None, each.system)) if controls else ()
    if backend == "sim":
        return Selection(plants, shown)
    if not everything:
        return Selection(tuple(plant for plant in plants if plant.processes), shown)
    unseen = tuple(plant for plant in plants if plant.timing)
    return Selection(tuple(plant for plant in plants if plant not in unseen), shown, unseen)


def find(option: str, name: str) -> tuple[Plant | Control, ...]:
    """All exhibits of this name: an id (``museum:ID`` too), a class, or a public bug (its address too).

    Args:
        option: of the command line, for the message.
        name: in any case, with ``_`` or ``-``; of a bug the owner may be left out.

    Raises:
        UsageError: there is none.
    """
    key = _key(name)
    known: dict[str, list[Plant | Control]] = {}
    exhibits: tuple[Plant | Control, ...] = (*catalogue.PLANTS, *catalogue.CONTROLS)
    for exhibit in exhibits:
        for word in dict.fromkeys(map(_key, names_of(exhibit))):
            known.setdefault(word, []).append(exhibit)
    if key in known:
        return tuple(known[key])
    for bug, why in catalogue.LEFT_OUT.items():
        if key in (_key(bug), _key(_short(bug))):
            raise UsageError(f"{option} {name}: no plant was made of this bug: {why}")
    listed = dict.fromkeys(word for each in exhibits for word in names_of(each))
    close = difflib.get_close_matches(name, listed, _MOST_SHOWN)
    if not close:
        spelt = {_key(word): word for word in listed}
        close = [spelt[word] for word in difflib.get_close_matches(key, spelt, _MOST_SHOWN)]
    hint = f"did you mean {' or '.join(close)}?" if close else "`museum --list` shows them"
    raise UsageError(f"{option} {name}: no exhibit has this id, class or public bug (owner/repository#number); {hint}")


def names_of(exhibit: Plant | Control) -> tuple[str, ...]:
    """What an exhibit may be called by."""
    if isinstance(exhibit, Control):
        return (exhibit.id, exhibit.name)
    return (exhibit.id, exhibit.name, *exhibit.bugs, *map(_short, exhibit.bugs))


def _plants(name: str) -> tuple[Plant, ...]:
    found = find("--plant", name)
    plants = tuple(each for each in found if isinstance(each, Plant))
    if not plants:
        raise UsageError(f"--plant {name}: that is a control; `verify --subject {found[0].subject}` runs it")
    return plants


def _short(bug: str) -> str:
    """``repository#number`` of ``owner/repository#number``."""
    return bug.partition("/")[2]


def _key(name: str) -> str:
    """What two names of the same have in common."""
    name = name.strip()
    url = _URL.fullmatch(name)
    if url is not None:
        name = "{}/{}#{}".format(*url.groups())
    return name.lower().removeprefix(f"{PREFIX}:").replace("_", "-")
