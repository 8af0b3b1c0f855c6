"""What came of every exhibit, and the score over all of them. Plain data and arithmetic, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from harness.diagnosis.symptoms import Symptom
from harness.faults.museum.exhibit import Control, Plant
from harness.museum.judging import Judgement, Naming, judge
from harness.report import result as results
from harness.report.console import count, duration
from harness.report.result import Failure, FoundAfter, Result
from harness.scenario.model import Scenario, steps
from harness.verdict import Stage

LEAST_RIGHT_PERCENT: Final = 95
"""Of the plants that were caught so many must be told at the right property and stage."""


class CaseSize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large a case is: ``elements`` of all parameters, ``bucket`` as asked for, in elements; ``parts`` of all
    steps."""

    world: float
    parameters: float
    elements: float
    bucket: float
    steps: float
    parts: float


class PlantOutcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a plant.

    Attributes:
        id: as ``--plant`` takes it; ``kind``, ``bugs``: from its label.
        properties, stages, symptoms: what may be told of it, from its label.
        seed: of its campaign; the same one gives the same scenarios.
        caught: a violation was found in time.
        undecided: it was not, in too few scenarios to say that it is missed; ``reason`` says why.
        found_after: when it was first seen; None: it was not.
        examples: scenarios judged in all; ``seconds``: of the whole campaign, explaining what was found with it.
        case: how large the case is that was saved (``failure.case``); None: none was.
        failure: what was told of it: property, stage, symptom, rank, parameter, … None: it was not caught.
        judgement: what is right in that; None where there is nothing to be judged.
        reason: why it was not caught, where more is known than that nothing was found.
        cut_short: the case may not be the smallest.
    """

    id: str
    kind: str
    bugs: tuple[str, ...]
    properties: tuple[str, ...]
    stages: tuple[str, ...]
    symptoms: tuple[str, ...]
    seed: int
    caught: bool = False
    undecided: bool = False
    found_after: FoundAfter | None = None
    examples: int = 0
    seconds: float = 0.0
    case: CaseSize | None = None
    failure: Failure | None = None
    judgement: Judgement | None = None
    reason: str | None = None
    cut_short: bool = False

    @property
    def missed(self) -> bool:
        """It was not caught, and there was time enough."""
        return not self.caught and not self.undecided


class ControlOutcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a right class: ``violated`` is a false alarm, ``unknown`` (``reason`` says why) is no pass.

    The other fields are those of :class:`PlantOutcome`.
    """

    id: str
    seed: int
    verdict: results.Verdict
    examples: int = 0
    seconds: float = 0.0
    failure: Failure | None = None
    reason: str | None = None


Outcome = PlantOutcome | ControlOutcome


class Share(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``right`` ones ``of`` so many."""

    right: int
    of: int


class Summary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The score.

    Attributes:
        plants: that were run; ``bugs``: public bugs that they stand for; ``left_out``: those that no plant was made of.
        caught, missed, undecided_plants: how many of the plants.
        not_judged: how many of those caught, since the case could not be saved and read again.
        controls: that were run; ``control_examples``: scenarios of all of them together; ``false_alarms``,
            ``undecided_controls``: how many of them.
        seconds, examples: medians of what it took to catch a plant; ``slowest_seconds``: the most; None: none was
            caught.
        case: medians of what the sizes of the cases are, one by one; ``cut_short``: cases that may not be the smallest.
        location: plants of which property and stage were told right, of those of which a failure was judged.
        symptom: plants with a symptom of which a right one was named; ``unnamed``: those without one of which none was.
        missed_symptom: plants with a symptom of which none was named.
        wrong_symptom: plants of which one was named that is not theirs.
        place: plants of which rank and parameter were told right, of those that are wrong in some places only.
    """

    plants: int
    bugs: int
    left_out: int
    caught: int
    missed: int
    undecided_plants: int
    not_judged: int
    controls: int
    control_examples: int
    false_alarms: int
    undecided_controls: int
    seconds: float | None
    slowest_seconds: float | None
    examples: float | None
    case: CaseSize | None
    cut_short: int
    location: Share
    symptom: Share
    unnamed: Share
    missed_symptom: int
    wrong_symptom: int
    place: Share


class MuseumResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome; fields that :class:`harness.report.result.Result` has too mean the same here.

    Attributes:
        verdict: see :func:`verdict_of`; ``reason`` says why the run ended before all was run, if it did.
        seconds_per_plant: the limit of each campaign, and ``examples_per_control`` that of a control's.
        plants, controls: what came of each, in the order of the catalogue.
        not_run: exhibits that nothing came of, since the run ended before.
        left_out: public bugs that no plant was made of, and why.
        report: the directory of the cases that were saved.
    """

    verdict: results.Verdict
    backend: str
    worlds: tuple[int, ...]
    seed: int
    workers: int
    seconds_per_plant: float
    examples_per_control: int
    seconds: float
    summary: Summary
    plants: tuple[PlantOutcome, ...] = ()
    controls: tuple[ControlOutcome, ...] = ()
    not_run: int = 0
    left_out: dict[str, str] = {}
    report: str = ""
    versions: dict[str, str] = {}
    reason: str | None = None
    interrupted: bool = False
    schema: int = results.SCHEMA

    @property
    def exit_code(self) -> int:
        """What the process exits with."""
        return results.exit_code(self.verdict, interrupted=self.interrupted)


def plant_outcome(plant: Plant, seed: int, result: Result, scenario: Scenario | None, situations: int) -> PlantOutcome:
    """What came of a plant's campaign.

    Args:
        plant: what was run.
        seed: of the campaign.
        result: of the campaign.
        scenario: of the case that was saved; None if none was.
        situations: how many a campaign must reach; fewer scenarios than that cannot even aim at each once.
    """
    failure, few = result.failure, _too_few(result, situations)
    return replace(
        _uncaught(plant, seed, result.reason or few),
        caught=result.verdict == "violated",
        undecided=few is not None,
        found_after=result.found_after,
        examples=result.examples.run,
        seconds=result.seconds,
        case=None if scenario is None else size_of(scenario),
        failure=failure,
        judgement=None if failure is None or scenario is None else judge(plant, failure, scenario),
        cut_short=failure is not None and failure.cut_short is not None,
    )


def control_outcome(control: Control, seed: int, result: Result, situations: int) -> ControlOutcome:
    """What came of a control's campaign; the arguments are those of :func:`plant_outcome`."""
    few = _too_few(result, situations)
    return ControlOutcome(
        id=control.id,
        seed=seed,
        verdict=result.verdict if few is None else "unknown",
        examples=result.examples.run,
        seconds=result.seconds,
        failure=result.failure,
        reason=result.reason or few,
    )


def not_judged(exhibit: Plant | Control, seed: int, reason: str) -> Outcome:
    """What came of an exhibit of which there is no result: undecided."""
    if isinstance(exhibit, Control):
        return ControlOutcome(id=exhibit.id, seed=seed, verdict="unknown", reason=reason)
    return replace(_uncaught(exhibit, seed, reason), undecided=True)


def verdict_of(summary: Summary, *, complete: bool) -> results.Verdict:
    """The verdict over a run. The rule, which `museum --help` states too:

    ``violated`` when a plant is missed, a control is a false alarm, a symptom is wrong, or of the plants that were
    caught (and judged) fewer than 95 % have the right property and stage. (Rank and parameter are told, and no part of
    it: where most ranks are wrong alike, the one that is not is the one that differs.) Else ``unknown`` when anything
    is undecided: a plant that was not caught or a control that was not violated in fewer scenarios than there are
    required situations, an exhibit that a campaign said nothing of, a catch that could not be judged, or, unless
    ``complete``, what was not run. Else ``holds``.
    """
    if summary.missed or summary.false_alarms or summary.wrong_symptom:
        return "violated"
    if 100 * summary.location.right < LEAST_RIGHT_PERCENT * summary.location.of:
        return "violated"
    if summary.undecided_plants or summary.undecided_controls or summary.not_judged or not complete:
        return "unknown"
    return "holds"


def _too_few(result: Result, situations: int) -> str | None:
    """Why nothing follows from a campaign that found nothing: it was too short; None where it was not.

    Scenarios that the class declined count: they were aimed at situations too. (None run is unknown in any case.)
    """
    run = result.examples.run
    if result.verdict == "violated" or run + result.examples.discarded >= situations:
        return None
    return (
        f"only {count(run, 'example')} in {duration(result.seconds)}, fewer than the {situations} situations there "
        "are; more --seconds-per-plant"
    )


def _uncaught(plant: Plant, seed: int, reason: str | None) -> PlantOutcome:
    return PlantOutcome(
        id=plant.id,
        kind=plant.kind.value,
        bugs=plant.bugs,
        properties=tuple(sorted(each.value for each in plant.properties)),
        stages=tuple(each.value for each in Stage if each in plant.stages),
        symptoms=tuple(each.value for each in Symptom if each in plant.symptoms),
        seed=seed,
        reason=reason,
    )


def size_of(scenario: Scenario) -> CaseSize:
    """How large a scenario is."""
    plans = list(steps(scenario))
    return CaseSize(
        world=scenario.world,
        parameters=len(scenario.parameters),
        elements=scenario.numel,
        bucket=scenario.bucket,
        steps=len(plans),
        parts=sum(len(plan.parts) for plan in plans),
    )


def summarise(plants: Sequence[PlantOutcome], controls: Sequence[ControlOutcome], left_out: int) -> Summary:
    """The score over what came of these; ``left_out``: public bugs that no plant was made of."""
    found = [plant.found_after for plant in plants if plant.found_after is not None]
    judged = [(bool(plant.symptoms), plant.judgement) for plant in plants if plant.judgement is not None]
    placed = [judgement.place for _, judgement in judged if judgement.place is not None]

    def named(naming: Naming) -> int:
        return sum(judgement.naming is naming for _, judgement in judged)

    num_with = sum(has for has, _ in judged)
    return Summary(
        plants=len(plants),
        bugs=len({bug for plant in plants for bug in plant.bugs}),
        left_out=left_out,
        caught=sum(plant.caught for plant in plants),
        missed=sum(plant.missed for plant in plants),
        undecided_plants=sum(plant.undecided for plant in plants),
        not_judged=sum(plant.caught and plant.judgement is None for plant in plants),
        controls=len(controls),
        control_examples=sum(control.examples for control in controls),
        false_alarms=sum(control.verdict == "violated" for control in controls),
        undecided_controls=sum(control.verdict == "unknown" for control in controls),
        seconds=statistics.median(each.seconds for each in found) if found else None,
        slowest_seconds=max((each.seconds for each in found), default=None),
        examples=statistics.median(each.examples for each in found) if found else None,
        case=_median_size([plant.case for plant in plants if plant.case is not None]),
        cut_short=sum(plant.cut_short for plant in plants),
        location=Share(right=sum(judgement.location for _, judgement in judged), of=len(judged)),
        symptom=Share(right=named(Naming.RIGHT), of=num_with),
        unnamed=Share(right=named(Naming.NONE), of=len(judged) - num_with),
        missed_symptom=named(Naming.MISSED),
        wrong_symptom=named(Naming.WRONG),
        place=Share(right=sum(placed), of=len(placed)),
    )


def _median_size(sizes: Sequence[CaseSize]) -> CaseSize | None:
    if not sizes:
        return None
    fields = CaseSize.__struct_fields__
    return CaseSize(**{name: statistics.median(getattr(size, name) for size in sizes) for name in fields})
