"""The tests of ``harness.conformance`` as pytest has them: collected from :mod:`harness.plugin.battery`, run, told."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import inputs
from harness.checking import Silent, violation
from harness.errors import UsageError
from harness.evaluate import Pool
from harness.launch.pool import PoolError
from harness.plugin import pools, settings
from harness.plugin.battery import Check, Conformance, checks
from harness.report.console import describe
from harness.runner import CampaignOptions, replay_case, run_campaign
from harness.scenario import codec, generate
from harness.scenario.model import Scenario
from harness.subjects.source import SubjectSource, from_case, parse

_DEFAULT_BACKEND = "sim"


class Battery(pytest.Collector):
    """What ``harness.conformance`` returned, under the name that the module gives it."""

    def __init__(self, *, conformance: Conformance, **rest: Any) -> None:  # noqa: ANN401 (pytest's own)
        super().__init__(**rest)
        self.conformance = conformance

    def collect(self) -> Iterator[pytest.Item]:
        """Every check of the battery; with ``--ranks-scenario`` that case alone."""
        given = self.config.getoption("--ranks-scenario")
        try:
            planned = list(checks(self.conformance, self.path.parent)) if given is None else [_single(given)]
        except UsageError as error:
            raise self.CollectError(str(error)) from None
        for check in planned:
            yield ScenarioItem.from_parent(self, name=check.name, check=check, conformance=self.conformance)


class ScenarioItem(pytest.Item):
    """One check over a subject; ``conformance`` None: over the one that the case names."""

    def __init__(self, *, check: Check, conformance: Conformance | None, **rest: Any) -> None:  # noqa: ANN401
        super().__init__(**rest)
        self.check = check
        self.conformance = conformance

    def runtest(self) -> None:
        """Run it on warm ranks; fails with what ``verify`` prints."""
        text: str | None
        try:
            text, declined = self._run()
        except UsageError as error:
            text, declined = str(error), False
        except PoolError as error:
            pools.of(self.config).drop(self._backend())
            text, declined = f"unknown: {error}", False
        if declined:
            pools.skip("the class declines this scenario (NotImplementedError)")
        if text is not None:
            pytest.fail(text, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it is: the file, and the name of the battery with that of the check."""
        battery = self.parent.name if self.parent is not None and self.conformance is not None else ""
        return self.path, 0, f"{battery}::{self.name}" if battery else self.name

    def _backend(self) -> str:
        mine = None if self.conformance is None else self.conformance.backend
        return self.check.backend or mine or settings.backend(self.config) or _DEFAULT_BACKEND

    def _run(self) -> tuple[str | None, bool]:
        """What is to be said where it does not hold, and whether the subject declined all of it."""
        check, backend = self.check, self._backend()
        case = None if check.kind == "campaign" else self._case(check)
        seed = _seed(self.conformance) if case is None else case.scenario.seed
        self.user_properties += [
            ("world", check.world),
            ("backend", backend),
            ("scenario_id", check.name if case is None else _identity(case)),
            ("seed", seed),
        ]
        options = self._options(backend, seed, case)
        ranks = pools.of(self.config).scenarios(backend, check.world)
        if case is None:
            result = run_campaign(options, Silent(), ranks, self._others)
            what = f"{options.subject.given} on {backend}, a campaign at world {check.world}"
        else:
            result = replay_case(case, check.path, options, Silent(), ranks, thorough=check.thorough)
            what = f"{options.subject.given} on {backend}, {describe(case.scenario)}"
        self.user_properties.append(("verdict", result.verdict))
        if result.interrupted:
            raise KeyboardInterrupt
        declined = case is not None and result.examples.run == 0 and result.examples.discarded > 0
        if result.failure is not None:
            # What is wrong first: of a line pytest's summary shows the beginning.
            return f"{result.failure.property} {violation(what, result.failure)}", False
        return (None if result.verdict == "holds" or declined else f"unknown: {what}: {result.reason}"), declined

    def _others(self) -> Pool:
        """The tier that the battery does not run on."""
        return pools.of(self.config).scenarios("gloo" if self._backend() == "sim" else "sim", self.check.world)

    def _case(self, check: Check) -> codec.Case:
        if check.path is not None:
            return codec.load(check.path)
        battery = self.conformance
        if battery is None or check.goal is None:
            raise ValueError("a scenario that is aimed at nothing")
        return codec.Case(drawn(battery, check.world, check.goal))

    def _options(self, backend: str, seed: int, case: codec.Case | None) -> CampaignOptions:
        battery = self.conformance
        return CampaignOptions(
            subject=battery.source if battery is not None else _named_by(case),
            worlds=(self.check.world,),
            backend=backend,
            seed=seed,
            examples=self.check.examples,
            seconds=None,
            bucket=None,
            parameters=None,
            report=inputs.DEFAULT_REPORT,
            timeout_s=None if battery is None else battery.timeout_s,
            canaries=False,
        )


def alone(session: pytest.Session, given: str) -> ScenarioItem:
    """The test of ``--ranks-scenario`` where no battery is collected.

    Raises:
        pytest.UsageError: there is no such case.
    """
    try:
        check = _single(given)
    except UsageError as error:
        raise pytest.UsageError(f"--ranks-scenario: {error}") from None
    return ScenarioItem.from_parent(session, name=check.name, check=check, conformance=None)


def _single(given: str) -> Check:
    path = Path(given)
    return Check(f"scenario-{path.stem}", "case", codec.load(path).scenario.world, path=path, thorough=True)


def drawn(battery: Conformance, world: int, goal: str) -> Scenario:
    """The scenario of a world that is aimed at a goal: the first of the campaign with the battery's seed."""
    turns = functools.partial(generate.turn, extension=battery.extension, system=battery.system)
    index = next(index for index in itertools.count() if turns(index, (world,)).goal.value == goal)
    return generate.draw(battery.seed, index, (world,), extension=battery.extension, system=battery.system)


def _named_by(case: codec.Case | None) -> SubjectSource:
    named = None if case is None else case.subject
    if named is None:
        return parse("zero2")
    return from_case(named.given, named.absolute, dict(named.args), named.config)


def _seed(battery: Conformance | None) -> int:
    return 0 if battery is None else battery.seed


def _identity(case: codec.Case) -> str:
    """The same for the same scenario, whatever found it."""
    return hashlib.sha256(codec.encode(codec.Case(case.scenario))).hexdigest()[:12]
