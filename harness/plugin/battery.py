"""``harness.conformance``: the whole battery of checks over a user's own class, as named tests. No torch is imported.

Which tests there are is known without running anything, and is the same in every process: pytest-xdist wants that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from harness.errors import UsageError
from harness.scenario import codec
from harness.scenario.model import CONTRACT, EXTENSIONS, MAX_WORLD, Extension, System
from harness.scenario.strategy import DECLARABLE, Offer
from harness.scenario.systems import GOALS, Space, can_hold
from harness.subjects.builtin import capabilities, known_system
from harness.subjects.load import SubjectError, declared, system_of
from harness.subjects.source import Scalar, SubjectSource, parse, with_config

Kind = Literal["aimed", "campaign", "case"]
BACKENDS = ("sim", "gloo", "nccl")
_MAX_NUMBER = 2**63 - 1  # of what a saved case holds
THOROUGH_EVERY = 10
"""Of so many aimed scenarios one is run as ``replay`` does it, which takes several times as long."""


@dataclass(frozen=True)
class Conformance:
    """A battery over one class; made by :func:`conformance`, collected by the pytest plugin.

    Attributes:
        source: the class, as ranks import it.
        system, extension: what kind it is, and what it takes beyond the contract's space.
        backend: None: simulated worlds, unless ``--ranks-backend`` names another.
    """

    source: SubjectSource
    system: System
    extension: Extension
    worlds: tuple[int, ...]
    examples: int
    real_examples: int
    backend: str | None
    seed: int
    cases: Path | None
    regressions: bool
    timeout_s: float | None


@dataclass(frozen=True)
class Check:
    """One test of a battery.

    Attributes:
        name: of the test.
        kind: a scenario that is aimed at the situation ``goal``; a campaign of ``examples`` drawn ones; a saved case.
        backend: None: what the battery runs on.
        thorough: as ``replay`` does it: several times, and with an eye on buffers in a simulated world.
    """

    name: str
    kind: Kind
    world: int
    goal: str | None = None
    examples: int = 1
    backend: str | None = None
    path: Path | None = None
    thorough: bool = False


def conformance(
    subject: type | str,
    *,
    worlds: int | Sequence[int] = (1, 2, 3, 4),
    examples: int = 30,
    real_examples: int = 3,
    backend: str | None = None,
    seed: int = 0,
    subject_args: Mapping[str, Scalar] | None = None,
    config: Mapping[str, Any] | None = None,
    system: System | None = None,
    cases: str | Path | None = None,
    regressions: bool = True,
    timeout_s: float | None = None,
) -> Conformance:
    """The whole battery over a class, as tests: ``test_mine = harness.conformance(MyOptimizer, worlds=(2, 3))``.

    For each world: a scenario aimed at each situation that its kind of system can be in, named after it; a campaign of
    drawn scenarios; and a short one on real gloo ranks. Then the cases that the package has kept of bugs in other
    classes, and the user's own. All on ranks that stay warm; scenarios are drawn from a fixed seed, so that a test is
    the same every time. A failure says what ``replay`` says of its case, which is saved and not made smaller.

    A scenario that the class declines (``NotImplementedError``) is a skipped test; the campaign of a world fails if it
    declined everything.

    Args:
        subject: a class of a module (also of the file of tests), or as ``--subject`` has it.
        worlds: numbers of ranks, or one number.
        examples: of each world's campaign.
        real_examples: of each world's short campaign on gloo, where the rest is simulated; 0: none.
        backend: ``"sim"`` (all ranks of a world in one supervised process), ``"gloo"``, ``"nccl"``; None: what
            ``--ranks-backend`` says, else ``"sim"``.
        seed: of all that is drawn.
        subject_args: further keyword arguments of its constructor.
        config: of a distribution strategy.
        system: what kind a class is that is named by a string: ``"zero_master"`` (default), ``"muon"``, ``"strategy"``.
        cases: a directory of saved cases, relative to the file of tests.
        regressions: whether to run the cases of the package (of ZeRO classes alone).
        timeout_s: of one scenario; None: by its size.

    Raises:
        UsageError: an argument is not what it should be.
    """
    worlds = (worlds,) if isinstance(worlds, int) else worlds
    if not isinstance(worlds, Sequence) or not all(_is_whole(world, 1, MAX_WORLD) for world in worlds):
        raise UsageError(f"conformance: worlds={worlds!r}: expected whole numbers from 1 to {MAX_WORLD}, in a tuple")
    if not worlds or len(set(worlds)) < len(worlds):
        raise UsageError(f"conformance: worlds={worlds!r}: expected at least one, each once")
    for name, number, least in (("examples", examples, 1), ("real_examples", real_examples, 0), ("seed", seed, 0)):
        if not _is_whole(number, least, _MAX_NUMBER):
            raise UsageError(f"conformance: {name}={number!r}: expected a whole number of at least {least}")
    if timeout_s is not None and not (_is_number(timeout_s) and 0 < timeout_s < math.inf):
        raise UsageError(f"conformance: timeout_s={timeout_s!r}: expected a number of seconds above zero")
    for name, mapping in (("subject_args", subject_args), ("config", config)):
        if mapping is not None and not isinstance(mapping, Mapping):
            raise UsageError(f"conformance: {name}={mapping!r}: expected a mapping of names to values")
    for name, value in (subject_args or {}).items():
        if value is not None and not isinstance(value, str | int | float):
            raise UsageError(
                f"conformance: subject_args {name}={value!r}: expected text, a number, True, False or None"
            )
    if cases is not None and not isinstance(cases, str | Path):
        raise UsageError(f"conformance: cases={cases!r}: expected the path of a directory")
    if backend not in (None, *BACKENDS):
        raise UsageError(f"conformance: backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if system not in (None, *GOALS):
        raise UsageError(f"conformance: system={system!r}: expected one of {', '.join(GOALS)}")
    source = parse(subject if isinstance(subject, str) else named(subject), dict(subject_args or {}))
    if config is not None:
        source = with_config(source, dict(config))
    kind, extension = _kind(subject, source, system)
    if system not in (None, kind):
        raise UsageError(f"conformance: system={system!r}: {source.given} is of system {kind!r}")
    return Conformance(
        source=source,
        system=kind,
        extension=extension,
        worlds=tuple(worlds),
        examples=examples,
        real_examples=real_examples,
        backend=backend,
        seed=seed,
        cases=None if cases is None else Path(cases),
        regressions=regressions,
        timeout_s=timeout_s,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def named(cls: type) -> str:
    """A class as ``--subject`` has it: by its module where ranks find that, else by its file.

    Raises:
        UsageError: it is no class of a module.
    """
    if not isinstance(cls, type):
        raise UsageError(f"conformance: expected a class, or its name as --subject has it, got {type(cls).__name__}")
    name = cls.__qualname__
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if not name.isidentifier() or file is None:
        raise UsageError(f"conformance: {cls!r}: ranks can import only a class at the top level of a file")
    path = Path(file).absolute()
    # In a package imports may be relative, which a file alone does not have.
    if "." in cls.__module__ and _importable(cls.__module__, path):
        return f"{cls.__module__}:{name}"
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _importable(module: str, file: Path) -> bool:
    """Whether the name of a module leads to this file, without importing anything."""
    where: list[str] | None = None
    origin: str | None = None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), where)
        if spec is None:
            return False
        where, origin = list(spec.submodule_search_locations or ()), spec.origin
    return origin is not None and Path(origin).absolute() == file


def _kind(subject: type | str, source: SubjectSource, system: System | None) -> tuple[System, Extension]:
    """What kind of system the subject is, and what it takes beyond the contract, without importing anything."""
    known = known_system(source.absolute)
    if isinstance(subject, str) or known is not None:
        extension = CONTRACT if known is None else capabilities(source.absolute, source.config).extension
        return known or system or "zero_master", extension
    kind = system_of(subject)
    try:
        names = declared(subject, subject.__name__)
    except SubjectError as error:
        raise UsageError(str(error)) from None
    if kind == "strategy":
        offered: dict[str, Any] = {name: name in names for name in DECLARABLE}
        return kind, Extension(strategy=Offer(**offered))
    taken: dict[str, Any] = {name: name in names for name in EXTENSIONS}
    return kind, Extension(**taken)


def checks(battery: Conformance, directory: Path) -> Iterator[Check]:
    """All tests of a battery, in order; ``directory``: of the file of tests.

    Raises:
        UsageError: the directory of saved cases is none, or a case of it cannot be read.
    """
    space = Space(battery.system, None, battery.extension)
    for world in battery.worlds:
        goals = [goal.value for goal in GOALS[battery.system] if can_hold(goal, world, space)]
        for place, goal in enumerate(goals):
            name = f"{goal}[world{world}]"
            yield Check(name, "aimed", world, goal=goal, thorough=place % THOROUGH_EVERY == 0)
        yield Check(f"campaign[world{world}]", "campaign", world, examples=battery.examples)
        if battery.real_examples and battery.backend != "nccl":
            yield Check(
                f"campaign[world{world}-gloo]", "campaign", world, examples=battery.real_examples, backend="gloo"
            )
    if battery.regressions and battery.system == "zero_master":
        from harness.checking import REGRESSIONS

        yield from _saved("regression", REGRESSIONS, battery)
    if battery.cases is not None:
        given = directory / battery.cases
        if not given.is_dir():
            raise UsageError(f"conformance: cases={str(battery.cases)!r}: no such directory: {given}")
        yield from _saved("case", given, battery)


def _saved(prefix: str, directory: Path, battery: Conformance) -> Iterator[Check]:
    for path in sorted(directory.glob("*.json")):
        scenario = codec.load(path).scenario
        # Cases of the package are of all worlds; one that the user has kept is meant to be run.
        if scenario.world in battery.worlds or prefix == "case":
            yield Check(f"{prefix}-{path.stem}", "case", scenario.world, path=path, thorough=prefix == "case")
