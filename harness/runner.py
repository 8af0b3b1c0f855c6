"""Campaigns: draw scenarios, run them on warm ranks, conclude, and on a violation shrink, save and explain.

The composition root of the parent process, which imports no torch, joins no group and never imports a subject.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from harness.canary import check_canaries
from harness.capacity import available_memory, simulation_lanes
from harness.drawing import Drawer
from harness.ending import raise_if_interrupted, without_traceback
from harness.errors import UsageError
from harness.evaluate import Conclusion, Evaluation, Evaluator, Pool, UndecidedError, cost, start_pool
from harness.explain import SHRINK_S, Explainer, Found, Runs, Smaller, diagnosed, property_of, repeated
from harness.failures import saved_failure
from harness.faults import expect, language
from harness.launch.pool import PoolError
from harness.launch.process import default_device
from harness.pace import CHUNK_S, Pace
from harness.relate import Related, RelatedEvaluator
from harness.report import result as results
from harness.report.result import Examples, FoundAfter, Result, WorldExamples
from harness.scenario import codec, generate, muon_presets, presets, strategy_presets
from harness.scenario.model import CONTRACT, Domain, Extension, Parameter, Scenario, System, check
from harness.scenario.relations import RelationReference, relations_of
from harness.scenario.smaller import smallest
from harness.scenario.systems import PROPERTIES, SITUATIONS, Space, required
from harness.sim.choices import DEFAULT_ORDER, DEFAULT_SCHEDULE
from harness.subjects.builtin import capabilities, known_system
from harness.subjects.source import SubjectSource
from harness.tally import Tally
from harness.verdict import Oracle, Property

FULL_CAMPAIGN = 300
"""From this many scenarios on (and worlds 3 and 4) a campaign must have reached every required situation."""

LARGEST_BUCKET = 2**25
"""Requested bucket of a large parameter list (elements): the default of ZeroMaster, what people train with."""

REPEAT_EVERY = 20
"""Of so many scenarios one is run twice and must give the same bits: in the second half the first whose sums round, of
three ranks or more, where there is one, else the last."""

RELATE_EVERY = 10
"""Every so many scenarios whose sums are exact one is held against another that is related to it."""

CLOSELY_EVERY = 60
"""Every so many scenarios one is looked at closely, in a simulated world: that takes as long as several."""


@dataclass(frozen=True)
class CampaignOptions:
    """What to verify and how far.

    Attributes:
        examples: scenarios in all; with ``parameters``, scenarios for each world.
        seconds: upper bound of the whole campaign.
        bucket: requested bucket size in elements; None: drawn, or with ``parameters`` :func:`bucket_for` them.
        parameters: the user's own list instead of drawn ones; a failing case is of some of these, cut shorter.
        report: where failing cases are saved.
        timeout_s: limit of one scenario; None: by its size.
        stall_s: limit of the time in which no rank gets on; None: by the size of the scenario.
        shrink_s: upper bound of the time spent on making a failing scenario smaller.
        order, schedule: of simulated worlds (``backend`` sim), see :mod:`harness.sim.choices`.
        device: where tensors lie, ``"cpu"`` or ``"cuda"``; None: as goes with the backend.
        canaries: begin a campaign of ``FULL_CAMPAIGN`` scenarios or more with subjects that must fail; False where
            whoever runs it on this pool has done so.
    """

    subject: SubjectSource
    worlds: tuple[int, ...]
    backend: str
    seed: int
    examples: int
    seconds: float | None
    bucket: int | None
    parameters: tuple[Parameter, ...] | None
    report: Path
    timeout_s: float | None
    shrink_s: float = SHRINK_S
    stall_s: float | None = None
    order: str = DEFAULT_ORDER
    schedule: str = DEFAULT_SCHEDULE
    canaries: bool = True
    device: str | None = None


class Observer(Protocol):
    """Told what a campaign does, for progress display."""

    def started(self, options: CampaignOptions) -> None:
        """The campaign begins."""

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        """A scenario is about to run; ``rate`` in examples per second so far."""

    def shrinking(self, tried: int, best: Scenario) -> None:
        """A failing scenario is being made smaller."""

    def note(self, text: str) -> None:
        """Something the user should know."""


@runtime_checkable
class Recorder(Protocol):
    """An observer that is told too what came of each scenario, to keep it."""

    def judged(self, index: int, scenario: Scenario, evaluation: Evaluation) -> None:
        """A scenario was run."""

    def violated(self, found: Found) -> None:
        """A violation was seen, or is known in a better form."""


def run_campaign(
    options: CampaignOptions,
    observer: Observer,
    pool: Pool | None = None,
    other: Callable[[], Pool] | None = None,
) -> Result:
    """Run scenarios until the first violation, the number of examples, or the time is up.

    Ranks are started for the campaign and ended with it, unless a ``pool`` (:func:`harness.evaluate.start_pool`) is
    given, which stays the caller's. So does what ``other`` gives when it is asked: a pool of simulated worlds if the
    ranks of the campaign are real, else of real ones.

    Raises:
        UsageError: the subject does not import or lacks the interface; or the parameters do not fit this machine.
    """
    tally = Tally(system=known_system(options.subject.absolute) or "zero_master")
    observer.started(options)
    source: _Source = _Listed(options) if options.parameters is not None else _Drawn(options)
    found: Found | None = None
    reason: str | None = None
    interrupted = False
    try:
        lanes = simulation_lanes(options.worlds, source.memory) if options.backend == "sim" else 1
        with _ranks(options, pool, lanes) as ranks, _OtherTier(options, other) as tier:
            evaluator = _evaluator(options, ranks)
            tally.versions = evaluator.versions
            evaluator.prepare(options.worlds[0])  # a subject that cannot be used is told before the first example
            source.extend(evaluator.system, evaluator.extension)
            tally.system, tally.extension = evaluator.system, evaluator.extension
            full = source.total >= FULL_CAMPAIGN
            if full and options.canaries:
                check_canaries(ranks, options.worlds[0])
            search = _Search(options, observer, evaluator, tally, source, tier if full else None)
            try:
                found = search.run()
            except KeyboardInterrupt:
                interrupted, found = True, search.explainer.best
            except (UndecidedError, UsageError) as error:
                if search.explainer.best is None:
                    raise
                # That the subject is wrong has been seen; only the case may not be the smallest.
                found = search.explainer.best
                observer.note(f"a violation was found, but its case could not be made smaller: {error}")
    except UndecidedError as error:
        reason = without_traceback(str(error))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        source.close()
    if found is None and reason is None and not interrupted:
        reason = undecided_reason(options, tally)
    return result_of(options, tally, found, reason, interrupted)


def replay_case(
    case: codec.Case,
    path: Path | None,
    options: CampaignOptions,
    observer: Observer,
    pool: Pool | None = None,
    *,
    thorough: bool = True,
) -> Result:
    """Run one case, several times: a violation that comes and goes is still one (``determinism``).

    ``path``: where it was saved; None: it was not, and is if it is violated. Not ``thorough``: it is run twice in all,
    and not looked at closely in a simulated world.
    """
    scenario = case.scenario
    tally = Tally(system=scenario.system)
    recorder = observer if isinstance(observer, Recorder) else None
    observer.started(options)
    found: Found | None = None
    reason: str | None = None
    interrupted = False
    _check_memory(scenario.parameters, scenario.world, scenario.bucket, "the case", simulated=options.backend == "sim")
    try:
        with _ranks(options, pool) as ranks, _OtherTier(options) as tier:
            evaluator = _evaluator(options, ranks)
            tally.versions = evaluator.versions
            evaluator.prepare(scenario.world)
            observer.example(0, 1, scenario.world, scenario, 0.0)
            first = evaluator.evaluate(scenario)
            if thorough:
                first = evaluator.closely(scenario, first)
            _require_hit(scenario, first)
            tally.add(scenario, first)
            if recorder is not None:
                recorder.judged(0, scenario, first)
            runs: Runs = evaluator
            if case.relation is not None:
                runs = RelatedEvaluator(evaluator, case.relation, tier)
                seen = runs.relate(scenario, first)
                first = seen.evaluation
                tally.checks[Property.INVARIANCE.value] += seen.compared
            if first.conclusion is Conclusion.VIOLATED:
                found = Found(scenario, first, case.relation)
                if recorder is not None:
                    recorder.violated(found)
            times = None if thorough else 1
            evaluation = first if first.hung else repeated(runs, scenario, first, tally.checks, times=times)
            if evaluation.conclusion is Conclusion.VIOLATED:
                found = Found(scenario, evaluation, case.relation)  # should the next line be interrupted
                evaluation = runs.attributed(scenario, evaluation)
                found = Found(scenario, diagnosed(scenario, evaluation, []), case.relation)
            elif evaluation.conclusion is Conclusion.UNSUPPORTED:
                reason = "the subject says that this case is outside its space (NotImplementedError)"
            elif _compared_nothing(evaluation.checks):
                reason = "nothing was compared"
    except UndecidedError as error:
        reason = without_traceback(str(error))
    except KeyboardInterrupt:
        interrupted = True
    return result_of(options, tally, found, reason, interrupted, replayed=None if path is None else (case, path))


def _ranks(options: CampaignOptions, pool: Pool | None, lanes: int = 1) -> AbstractContextManager[Pool]:
    return start_pool(options.backend, lanes, options.device) if pool is None else nullcontext(pool)


def _evaluator(options: CampaignOptions, ranks: Pool) -> Evaluator:
    return Evaluator(
        options.subject,
        ranks,
        timeout_s=options.timeout_s,
        stall_s=options.stall_s,
        order=options.order,
        schedule=options.schedule,
    )


class _OtherTier:
    """The same subject where ranks are simulated if those of the campaign are real, and the other way round.

    Started when it is asked for, or taken from whoever gives a pool then.
    """

    def __init__(self, options: CampaignOptions, given: Callable[[], Pool] | None = None) -> None:
        self._options = options
        self._given = given
        self._stack = ExitStack()
        self._evaluator: Evaluator | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self) -> Evaluator:
        if self._evaluator is None:
            options = self._options
            backend = "gloo" if options.backend == "sim" else "sim"
            device = options.device or default_device(options.backend)  # it is the tier that differs
            try:
                pool = (
                    self._stack.enter_context(start_pool(backend, 1, device)) if self._given is None else self._given()
                )
            except PoolError as error:
                raise UndecidedError(str(error)) from error
            self._evaluator = _evaluator(options, pool)
        return self._evaluator


# --- where scenarios come from ----------------------------------------------------------------------------------------


class _Source(Protocol):
    """``memory``: bytes that a scenario needs, where they are many; else 0."""

    total: int
    memory: int

    def extend(self, system: System, extension: Extension) -> None:
        """What kind of system the subject is, and what it takes beyond the contract's space.

        Told before the first scenario is asked for; may raise :class:`harness.errors.UsageError`.
        """

    def scenario(self, index: int, ahead: int = 1) -> Scenario:
        """The scenario of this number; the same every time. About ``ahead`` of those after it will be needed soon."""

    def others(self, index: int) -> Iterator[Scenario]:
        """Scenarios of other settings than number ``index``; asked for when the search is over."""

    def close(self) -> None:
        """End what was started; no scenario is asked for afterwards."""


class _Drawn:
    """Scenarios drawn by Hypothesis from the seed; the next ones while the ranks run the last."""

    memory = 0

    def __init__(self, options: CampaignOptions) -> None:
        self.options = options
        self.total = options.examples
        self._drawer = Drawer()
        self._begun: dict[int, Future[Scenario]] = {}
        self._system: System = "zero_master"
        self._extension = CONTRACT

    def extend(self, system: System, extension: Extension) -> None:
        self._system, self._extension = system, extension

    def scenario(self, index: int, ahead: int = 1) -> Scenario:
        begun = self._begun.pop(index, None)
        scenario = self._draw(index) if begun is None else begun.result()
        for later in range(index + 1, min(index + 1 + ahead, self.total)):
            if later not in self._begun:
                self._begun[later] = self._drawer.begin(self._draw, later)
        return scenario

    def others(self, index: int) -> Iterator[Scenario]:
        self.close()  # one use of Hypothesis at a time
        return map(self._draw, itertools.count(index + 1))

    def close(self) -> None:
        self._drawer.close()

    def _draw(self, index: int) -> Scenario:
        options = self.options
        return generate.draw(
            options.seed,
            index,
            options.worlds,
            bucket=options.bucket,
            extension=self._extension,
            system=self._system,
        )


class _Listed:
    """A few scenarios over a given parameter list, the same ones for each world: held, spilled, clipped, …"""

    def __init__(self, options: CampaignOptions) -> None:
        self.options = options
        parameters = options.parameters or ()
        self.memory = 0
        bucket, simulated = options.bucket or bucket_for(parameters), options.backend == "sim"
        for world in options.worlds:
            needed = _check_memory(parameters, world, bucket, "the parameter list", simulated=simulated)
            self.memory = max(self.memory, needed)
        self._extension = capabilities(options.subject.absolute, options.subject.config).extension
        self.cases = self._cases(known_system(options.subject.absolute) or "zero_master")
        self.total = len(self.cases)

    def _cases(self, system: System) -> list[Scenario]:
        options, parameters = self.options, self.options.parameters or ()
        bucket = options.bucket or bucket_for(parameters)
        campaign: Callable[[Sequence[Parameter], int, int, int, int], list[Scenario]] = presets.campaign
        if system == "muon":
            campaign = muon_presets.campaign
        elif system == "strategy":
            campaign = functools.partial(strategy_presets.campaign, offer=self._extension.strategy)
        found: list[Scenario] = []
        for world in options.worlds:
            cases = campaign(parameters, world, bucket, options.seed, options.examples)
            for case in cases[:3]:  # each form: the others differ in their seeds alone
                problem = check(case)
                if problem is not None:
                    hint = "; use a larger --bucket" if problem.startswith("operations") else ""
                    raise UsageError(f"the parameter list at world {world}: {problem}{hint}")
            found += cases
        return found

    def extend(self, system: System, extension: Extension) -> None:
        """A given list is as it is; what is done with it depends on the system."""
        if any(case.system != system for case in self.cases) or extension != self._extension:
            self._extension = extension
            self.cases = self._cases(system)

    def scenario(self, index: int, ahead: int = 1) -> Scenario:
        return self.cases[index]

    def others(self, index: int) -> Iterator[Scenario]:
        return iter(self.cases[index + 1 :])

    def close(self) -> None:
        """Nothing runs."""


def bucket_for(parameters: Sequence[Parameter]) -> int:
    """A bucket for a given list: what people train with, but small enough that there are bucket edges to get wrong."""
    numel = sum(parameter.numel for parameter in parameters)
    return min(LARGEST_BUCKET, max(1, 2 * numel // 9))


def _check_memory(parameters: tuple[Parameter, ...], world: int, bucket: int, what: str, *, simulated: bool) -> int:
    """Refuse what cannot fit before any rank starts; returns how many bytes are needed."""
    needed = presets.memory_estimate(parameters, world, bucket, num_processes=1 if simulated else world)
    available = available_memory()
    if needed > available:
        numel = sum(parameter.numel for parameter in parameters)
        raise UsageError(
            f"{what} ({numel:,} elements) at world {world} needs about {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are available: use a smaller --world or a smaller model"
        )
    return needed


# --- the search for a violation ---------------------------------------------------------------------------------------


class _Search:
    def __init__(
        self,
        options: CampaignOptions,
        observer: Observer,
        evaluator: Evaluator,
        tally: Tally,
        source: _Source,
        tier: Callable[[], Evaluator] | None = None,
    ) -> None:
        self.options = options
        self.observer = observer
        self.evaluator = evaluator
        self.tally = tally
        self.source = source
        self.tier = tier
        self.num_exact = self.num_related = 0
        self.num_repeated = 0
        self.related_at = 0
        self.recorder = observer if isinstance(observer, Recorder) else None
        self.better = None if self.recorder is None else self.recorder.violated
        self.explainer = Explainer(observer, evaluator, tally.checks, shrink_s=options.shrink_s, better=self.better)
        self.pace = Pace(evaluator.lanes)
        self.last: dict[int, Scenario] = {}  # world -> the scenario its ranks ran last
        self.began_s = tally.elapsed  # the ranks are there

    def run(self) -> Found | None:
        """The first violation, made small; None when all scenarios hold.

        What ran beside a scenario that fails counts only if it comes before that.
        """
        for first, chunk in self._chunks():
            evaluations = self.evaluator.evaluate_many(chunk)
            for index, scenario in enumerate(chunk, first):
                raise_if_interrupted()
                rate = self.tally.num_run / max(self.tally.elapsed, 1e-9)
                self.observer.example(index, self.source.total, scenario.world, scenario, rate)
                evaluation = self._counted(index, scenario, next(evaluations))
                if evaluation.conclusion is Conclusion.VIOLATED:
                    self._seen()
                    smaller, others = self._smaller(scenario), self.source.others(index)
                    return self.explainer.explain(
                        scenario, evaluation, smaller, others=others, limit_s=self._seconds_left()
                    )
                found = self._relate(scenario, evaluation)
                if found is not None:
                    return found
        return self._crashed_afterwards()

    def _counted(self, index: int, scenario: Scenario, evaluation: Evaluation) -> Evaluation:
        """What comes of a scenario, some of which are run twice."""
        self.last[scenario.world] = scenario
        _require_hit(scenario, evaluation)
        self.tally.add(scenario, evaluation)
        if self.recorder is not None:
            self.recorder.judged(index, scenario, evaluation)
        self.pace.ran(cost(scenario), evaluation.seconds)
        if evaluation.conclusion is Conclusion.HOLDS and self._to_be_repeated(index, scenario):
            settling = 2 if self.evaluator.lanes > 1 else 1
            evaluation = repeated(self.evaluator, scenario, evaluation, self.tally.checks, times=1, settling=settling)
        if index % CLOSELY_EVERY == CLOSELY_EVERY - 1:
            evaluation = self.evaluator.closely(scenario, evaluation)
        return evaluation

    def _to_be_repeated(self, index: int, scenario: Scenario) -> bool:
        """What changes the order of a sum changes nothing where it is exact or of two: so rather one that shows it."""
        block, place = divmod(index, REPEAT_EVERY)
        order_shows = scenario.values.domain is Domain.GENERAL and scenario.world > 2
        first = REPEAT_EVERY // 2 if order_shows else REPEAT_EVERY - 1
        if self.num_repeated > block or place < first:
            return False
        self.num_repeated = block + 1
        return True

    def _relate(self, scenario: Scenario, evaluation: Evaluation) -> Found | None:
        """Some scenarios are held against a related one, as soon as one comes to which a relation applies.

        Relations take turns.
        """
        if evaluation.conclusion is not Conclusion.HOLDS or scenario.values.domain is Domain.GENERAL:
            return None
        self.num_exact += 1
        if self.num_exact < self.related_at + RELATE_EVERY:
            return None
        relations, turn = relations_of(scenario.system), self.num_related
        for number in range(len(relations)):
            relation = relations[(turn + number) % len(relations)]
            runs = RelatedEvaluator(self.evaluator, RelationReference(relation, turn, self.options.worlds), self.tier)
            seen = runs.relate(scenario, evaluation)
            if seen.evaluation.conclusion is Conclusion.VIOLATED:
                self._seen()
                return self._explain_related(scenario, runs, seen)
            if seen.compared:
                self.tally.checks[Property.INVARIANCE.value] += 1
                self.related_at, self.num_related = self.num_exact, turn + 1
                return None
        return None

    def _explain_related(self, scenario: Scenario, runs: RelatedEvaluator, seen: Related) -> Found:
        checks, shrink_s = self.tally.checks, self.options.shrink_s
        self.explainer = Explainer(
            self.observer, runs, checks, shrink_s=shrink_s, better=self.better, relation=runs.reference
        )
        smaller = self._smaller(scenario)
        found = self.explainer.explain(scenario, seen.evaluation, smaller, limit_s=self._seconds_left())
        other = runs.other(found.scenario)
        if seen.broken or other is None or property_of(found.evaluation) is Property.DETERMINISM:
            return found
        # The other scenario is wrong by itself: the case is that one alone.
        return Found(other, self.evaluator.attributed(other, found.evaluation))

    def _smaller(self, scenario: Scenario) -> Smaller:
        """Within what was asked for: its worlds, and its bucket size where one was given."""
        given = self.options
        keep_bucket, extension = given.bucket is not None, self.evaluator.extension
        return functools.partial(smallest, scenario, worlds=given.worlds, keep_bucket=keep_bucket, extension=extension)

    def _crashed_afterwards(self) -> Found | None:
        """A rank may also end when it has sent its last verdict."""
        for world, scenario in self.last.items():
            evaluation = self.evaluator.crashed_when_idle(world)
            if evaluation is not None:
                self._seen()
                found = Found(scenario, evaluation)
                if self.better is not None:
                    self.better(found)
                return found
        return None

    def _seen(self) -> None:
        """A violation, which ends the search: what is left is to explain it."""
        self.tally.found_after = FoundAfter(seconds=self.tally.elapsed - self.began_s, examples=self.tally.num_run)

    def _chunks(self) -> Iterator[tuple[int, list[Scenario]]]:
        """Scenarios to be evaluated together, with the index of the first."""
        index, total = 0, self.source.total
        held: Scenario | None = None  # what the last chunk had no time for
        while index < total:
            raise_if_interrupted()
            if self.options.seconds is not None and self.tally.elapsed >= self.options.seconds:
                self.observer.note(f"time is up after {index} of {total} examples")
                return
            most, most_s, ahead = self.pace.next_size(), min(CHUNK_S, self._seconds_left()), self.pace.largest
            chunk = [self.source.scenario(index, ahead) if held is None else held]
            held, costs = None, cost(chunk[0])
            while len(chunk) < min(most, total - index):
                # What is drawn ahead is drawn while the chunk runs.
                held = self.source.scenario(index + len(chunk), ahead)
                costs += cost(held)
                if self.pace.expected_s(costs) > most_s:
                    break
                chunk.append(held)
                held = None
            yield index, chunk
            index += len(chunk)

    def _seconds_left(self) -> float:
        return math.inf if self.options.seconds is None else max(self.options.seconds - self.tally.elapsed, 0.0)


def _require_hit(scenario: Scenario, evaluation: Evaluation) -> None:
    if evaluation.conclusion is Conclusion.UNHIT:
        missed = ", ".join(map(language.text, expect.unhit(scenario, evaluation.hits)))
        raise UndecidedError(
            f"a fault of the scenario never struck ({missed}): the subject ended before, or calls fewer collectives"
        )


# --- the result -------------------------------------------------------------------------------------------------------

# By kind of system, what every subject is asked for, so what a full campaign must have checked at least once.
APPLICABLE = PROPERTIES


def undecided_reason(options: CampaignOptions, tally: Tally) -> str | None:
    """Why a campaign without a violation is no pass: it compared nothing, or a full one left something out."""
    if tally.num_run == 0:
        outside = f" (all {tally.discarded} drawn lie outside the subject's space)" if tally.discarded else ""
        return f"no example was run{outside}: nothing was compared"
    if _compared_nothing(tally.checks):
        return "nothing was compared"
    full = tally.num_run + tally.discarded >= FULL_CAMPAIGN and {3, 4} <= set(options.worlds)
    if not full or options.parameters is not None:
        return None
    missing = not_reached(options, tally)
    if missing:
        return f"a full campaign never reached: {', '.join(missing)}"
    unchecked = [prop.value for prop in APPLICABLE[tally.system] if not tally.checks[prop.value]]
    if unchecked:
        return f"a full campaign never checked: {', '.join(unchecked)}"
    return None


def not_reached(options: CampaignOptions, tally: Tally) -> tuple[str, ...]:
    """The situations that a full campaign must reach and that this one did not; of a given list none is asked."""
    if options.parameters is not None:
        return ()
    wanted = required(options.worlds, Space(tally.system, options.bucket, tally.extension))
    # What every scenario that had it was declined for lies outside the subject's space; all else is to be reached.
    names = (situation.value for situation in wanted)
    return tuple(name for name in names if not tally.reached[name] and not tally.declined[name])


def _compared_nothing(checks: Mapping[str, int]) -> bool:
    return not checks.get(Property.WEIGHTS.value) and not checks.get(Property.INTAKE.value)


def result_of(
    options: CampaignOptions,
    tally: Tally,
    found: Found | None,
    reason: str | None,
    interrupted: bool,
    replayed: tuple[codec.Case, Path] | None = None,
) -> Result:
    """The result of what was tallied; a violation is saved as a case."""
    elapsed = tally.elapsed
    per_world = {
        world: WorldExamples(count, count / max(tally.seconds[world], 1e-9))
        for world, count in sorted(tally.run.items())
    }
    verdict: results.Verdict = "violated" if found is not None else "unknown" if reason or interrupted else "holds"
    return Result(
        verdict=verdict,
        subject=options.subject.given,
        backend=options.backend,
        order=options.order if options.backend == "sim" else None,
        schedule=options.schedule if options.backend == "sim" else None,
        worlds=options.worlds,
        seed=options.seed,
        examples=Examples(run=tally.num_run, discarded=tally.discarded, per_world=per_world),
        seconds=elapsed,
        examples_per_second=tally.num_run / max(elapsed, 1e-9),
        oracle={rule.value: tally.oracle[rule.value] for rule in Oracle},
        properties={prop.value: tally.checks[prop.value] for prop in Property},
        reached={situation.value: tally.reached[situation.value] for situation in SITUATIONS[tally.system]},
        system=tally.system,
        missing=not_reached(options, tally) if replayed is None else (),
        margin=tally.margin,
        changed=dict(tally.changed),
        recycled=tuple(tally.recycled),
        device=options.device or default_device(options.backend),
        versions={**results.versions(), **tally.versions},
        failure=None if found is None else saved_failure(options, found, replayed),
        found_after=tally.found_after,
        reason=reason,
        interrupted=interrupted,
        verb="verify" if replayed is None else "replay",
    )
