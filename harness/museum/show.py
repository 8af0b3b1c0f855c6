"""What a person sees of a museum: progress while it runs, then a table of the exhibits and the score. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, Final, Self

from msgspec import structs
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.faults.museum.exhibit import PREFIX
from harness.museum.campaign import WorkerView
from harness.museum.judging import Naming
from harness.museum.score import ControlOutcome, MuseumResult, Outcome, PlantOutcome, Share, Summary
from harness.report.console import TextConsole, count, duration, failure_lines, live_display, visible
from harness.report.result import FoundAfter

_STYLES = {"holds": "bold green", "violated": "bold red", "unknown": "bold yellow"}

LINE_CHARS: Final = 80
"""Of a row of the table, unless an id is longer than that."""

_MOST_REPLAYS: Final = 3
_MORE_TIME: Final = 3
"""So many times the limit is offered to what it was too short for."""

_SYMPTOMS: Final = {Naming.RIGHT: "right", Naming.MISSED: "missed", Naming.NONE: "-", Naming.WRONG: "WRONG"}
_LEGEND: Final = (
    "sec, ex: seconds and examples until it was seen",
    "case: ranks, elements, steps (s0: it was built only); +: may not be the smallest",
    "told: the property and the stage that were named; what is not right is below it",
    "symptom: right, missed (it has one, none was named), WRONG (another one was),",
    "         - (it has none, and none was named)",
)


class MuseumProgress:
    """An ``Observer`` of :mod:`harness.museum.campaign` and a context manager.

    On a terminal a table of the workers that redraws itself; elsewhere a line for each exhibit.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._console = TextConsole(stream)
        self._live = live_display(self._console, Text("starting workers"))
        self._total = self._done = 0
        self._not_right = 0

    def __enter__(self) -> Self:
        """Start the live table, if there is one."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it and give the terminal back as it was."""
        if self._live is not None:
            self._live.stop()

    def began(self, exhibits: int, workers: int) -> None:
        """So many exhibits are to be run."""
        self._total = exhibits
        self._console.say(f"{count(exhibits, 'exhibit')}, {count(workers, 'worker')}")

    def view(self, workers: Sequence[WorkerView]) -> None:
        """What goes on now."""
        if self._live is not None:
            so_far = f"{self._done} of {self._total} exhibits, {self._not_right} not as they must be"
            self._live.update(Group(workers_table(workers), Text(so_far, no_wrap=True)))

    def done(self, outcome: Outcome) -> None:
        """What came of an exhibit."""
        self._done += 1
        right = outcome.caught if isinstance(outcome, PlantOutcome) else outcome.verdict == "holds"
        undecided = outcome.undecided if isinstance(outcome, PlantOutcome) else outcome.verdict == "unknown"
        self._not_right += not right
        if self._live is None or not right:
            style = "" if right else "yellow" if undecided else "red"
            self._console.say(f"{self._done}/{self._total} {done_line(outcome)}", style)

    def note(self, text: str) -> None:
        """A line worth reading now, above the table."""
        self._console.say(text)


def workers_table(workers: Sequence[WorkerView]) -> Table:
    """A row for each worker."""
    rows = Table(box=None, pad_edge=False)
    for title in ("worker", "exhibit", "examples", "for", "now"):
        rows.add_column(title, no_wrap=True, overflow="ellipsis", justify="right" if title == "for" else "left")
    for worker in workers:
        seconds = duration(worker.seconds) if worker.exhibit else ""
        cells = (str(worker.number), worker.exhibit, str(worker.examples), seconds, worker.doing)
        rows.add_row(*(Text(visible(cell)) for cell in cells))
    return rows


def done_line(outcome: Outcome) -> str:
    """What came of an exhibit, in one line."""
    if isinstance(outcome, ControlOutcome):
        return f"{outcome.id} (control): {_control_verdict(outcome)}, {_ran(outcome)}{_because(outcome)}"
    if not outcome.caught or outcome.found_after is None:
        return f"{outcome.id}: {_uncaught(outcome)}, {_ran(outcome)}{_because(outcome)}"
    found = outcome.found_after
    return f"{outcome.id}: caught after {_seconds(found.seconds)}, {count(found.examples, 'example')}, {_told(outcome)}"


def left_to_sim(plants: int) -> str:
    """What --all leaves out on real ranks, and why."""
    return f"{count(plants, 'plant')} left out: races, which only simulated worlds show; --backend sim runs them"


def result_lines(result: MuseumResult) -> list[tuple[str, str]]:
    """The result as ``(line, style)`` pairs: plants by kind, controls, the score, and the headline last."""
    lines: list[tuple[str, str]] = []
    if result.plants:
        table = _Table(result.plants)
        lines.append((table.head, "bold"))
        for kind, plants in itertools.groupby(sorted(result.plants, key=lambda plant: plant.kind), _kind):
            lines.append((kind, "bold"))
            lines.extend(line for plant in plants for line in table.lines(plant))
        lines += [("", ""), *((line, "dim") for line in _LEGEND), ("", "")]
    if result.controls:
        lines.append(("controls: right in another way, never a violation", "bold"))
        lines.extend(line for control in result.controls for line in _control_lines(control))
        lines.append(("", ""))
    lines.extend((_labelled(label, text), "") for label, text in _summary_rows(result.summary))
    if result.not_run:
        lines.append((_labelled("not run", count(result.not_run, "exhibit")), ""))
    if result.reason is not None:
        lines.append((_labelled("reason", result.reason), ""))
    lines.extend((_labelled(label, text), "") for label, text in _next_steps(result))
    lines.append((headline(result), _STYLES[result.verdict]))
    return lines


def print_result(stream: IO[str], result: MuseumResult) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result):
        console.say(line, style)


def headline(result: MuseumResult) -> str:
    """The score in one line; shares are of the plants that were caught."""
    found = "; ".join(filter(None, (_found(result.summary), _right(result.summary))))
    verdict = f"{result.verdict}, interrupted" if result.interrupted else result.verdict
    return f"{verdict}: {found}; {result.backend}, {duration(result.seconds)}, seed {result.seed}"


def _found(summary: Summary) -> str:
    words = []
    if summary.plants:
        took = ""
        if summary.seconds is not None and summary.slowest_seconds is not None:
            took = f" (median {_seconds(summary.seconds)}, slowest {_seconds(summary.slowest_seconds)})"
        undecided = f", {summary.undecided_plants} undecided" if summary.undecided_plants else ""
        words.append(f"{summary.caught} of {count(summary.plants, 'plant')} caught{took}{undecided}")
    if summary.controls:
        undecided = f", {summary.undecided_controls} undecided" if summary.undecided_controls else ""
        ran = count(summary.control_examples, "example")
        alarms = count(summary.false_alarms, "false alarm")
        words.append(f"{alarms} on {count(summary.controls, 'control')} ({ran}){undecided}")
    return ", ".join(words) or "nothing was run"


def _right(summary: Summary) -> str:
    words = []
    if summary.location.of:
        words.append(f"property and stage right for {_percent(summary.location)}")
    if summary.symptom.of:
        words.append(f"symptom for {_percent(summary.symptom)} ({summary.wrong_symptom} wrong)")
    elif summary.wrong_symptom:
        words.append(f"symptom wrong for {summary.wrong_symptom}")
    if summary.place.of:
        words.append(f"rank and parameter for {_percent(summary.place)}")
    return ", ".join(words)


def _kind(plant: PlantOutcome) -> str:
    return plant.kind


class _Table:
    """The rows of plants: each column as wide as what is in it, ids as wide as the rest leaves room for."""

    def __init__(self, plants: Sequence[PlantOutcome]) -> None:
        self._seconds, self._examples, self._case, self._told = (
            max(len(title), *(len(_cells(plant)[column]) for plant in plants))
            for column, title in enumerate(("sec", "ex", "case", "told"))
        )
        rest = len(self._rest(("", "", "", ""), "symptom"))
        self._id = max(0, min(LINE_CHARS - rest - 3, max(len(plant.id) for plant in plants)))
        self.head = f"{'':<{self._id + 2}} {self._rest(('sec', 'ex', 'case', 'told'), 'symptom')}"

    def lines(self, plant: PlantOutcome) -> Iterable[tuple[str, str]]:
        """A row (two where the id is too long to leave room), and below it what is not as the label has it."""
        symptom = "" if plant.judgement is None else _SYMPTOMS[plant.judgement.naming]
        found = problems(plant)
        style = "" if not found else "red" if plant.missed else "yellow"
        name = plant.id
        if len(name) > self._id:
            yield f"  {name}", style
            name = ""
        yield f"  {name:<{self._id}} {self._rest(_cells(plant), symptom)}".rstrip(), style
        for problem in found:
            yield f"      {problem}", style

    def _rest(self, cells: tuple[str, str, str, str], symptom: str) -> str:
        seconds, examples, case, told = cells
        return (
            f"{seconds:>{self._seconds}} {examples:>{self._examples}} {case:<{self._case}} {told:<{self._told}} "
            f"{symptom}"
        )


def _cells(plant: PlantOutcome) -> tuple[str, str, str, str]:
    """Seconds, examples, case, told."""
    seconds, examples = _after(plant.found_after)
    return seconds, examples, _case(plant), _told(plant) if plant.caught else _uncaught(plant)


def problems(plant: PlantOutcome) -> list[str]:
    """What is not as the plant's label has it, a line each."""
    failure, judgement = plant.failure, plant.judgement
    if plant.undecided:
        return [f"undecided: {plant.reason}" if plant.reason else "undecided"]
    if not plant.caught or failure is None:
        return [f"nothing was found in {_ran(plant)}{_because(plant)}"]
    if judgement is None:
        return ["not judged: its case could not be saved and read again"]
    found = []
    if not judgement.location:
        right = f"{' or '.join(plant.properties)} at {' or '.join(plant.stages)}"
        found.append(f"PROPERTY, STAGE: told {failure.property} at {failure.stage}, right is {right}")
    if judgement.naming is Naming.WRONG:
        right = " or ".join(map(repr, plant.symptoms)) or "to name none"
        found.append(f"SYMPTOM: told {failure.symptom!r}, right is {right}")
    if judgement.place is False:
        parts = (("rank", failure.rank), ("parameter", failure.parameter), ("bucket", failure.bucket))
        told = ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "none"
        found.append(f"RANK, PARAMETER: told {told}; it is not there")
    return found


def _control_verdict(control: ControlOutcome) -> str:
    return {"violated": "FALSE ALARM", "unknown": "undecided"}.get(control.verdict, control.verdict)


def _control_lines(control: ControlOutcome) -> Iterable[tuple[str, str]]:
    style = {"holds": "", "unknown": "yellow"}.get(control.verdict, "red")
    yield f"  {control.id:<31} {_control_verdict(control):<11} {_ran(control)}", style
    if control.reason:
        yield f"      {control.reason}", style
    if control.failure is not None:
        yield from ((f"    {line}", "") for line in failure_lines(control.failure))


def _summary_rows(summary: Summary) -> Iterable[tuple[str, str]]:
    if summary.plants:
        more = f"; {summary.left_out} more {'is' if summary.left_out == 1 else 'are'} left out"
        bugs = count(summary.bugs, "public bug")
        yield "plants", f"{summary.plants}, for {bugs}{more if summary.left_out else ''}"
        undecided = f", {summary.undecided_plants} undecided" if summary.undecided_plants else ""
        yield "caught", f"{summary.caught} of {summary.plants}{undecided}"
    if summary.controls:
        undecided = f", {summary.undecided_controls} undecided" if summary.undecided_controls else ""
        ran = count(summary.control_examples, "example")
        yield "false alarms", f"{summary.false_alarms} on {count(summary.controls, 'control')} ({ran}){undecided}"
    if summary.seconds is not None and summary.slowest_seconds is not None and summary.examples is not None:
        examples = f"{summary.examples:g} example{'' if summary.examples == 1 else 's'}"
        slowest = f"{_seconds(summary.slowest_seconds)} at the slowest"
        yield "to catch", f"{_seconds(summary.seconds)} and {examples} at the median, {slowest}"
    if summary.case is not None:
        sizes = structs.asdict(summary.case).items()
        yield "median case", ", ".join(f"{name} {size:g}" for name, size in sizes)
    if summary.cut_short:
        yield "cut short", f"{count(summary.cut_short, 'case')} (+) may not be the smallest"
    if summary.location.of:
        yield "property, stage", f"{_share(summary.location)} right"
    if summary.symptom.of or summary.wrong_symptom:
        named = f"{_share(summary.symptom)} named right, " if summary.symptom.of else ""
        yield "symptom", f"{named}{summary.missed_symptom} missed, {summary.wrong_symptom} wrong"
    if summary.unnamed.of:
        yield "no symptom", f"{_share(summary.unnamed)} rightly not named any"
    if summary.place.of:
        yield "rank, parameter", f"{_share(summary.place)} right"


def _next_steps(result: MuseumResult) -> Iterable[tuple[str, str]]:
    """Where the cases are, and the commands that a reader may want next."""
    outcomes: tuple[Outcome, ...] = (*result.plants, *result.controls)
    replays = [each.failure.replay for each in outcomes if each.failure is not None and each.failure.replay is not None]
    if replays:
        yield "cases", f"saved in {result.report}"
        backend = "" if result.backend == "gloo" else f" --backend {result.backend}"
        if len(replays) > _MOST_REPLAYS:
            replays = [f"python -m harness replay CASE --subject {PREFIX}:ID{backend}  (each as a whole in --json)"]
        for number, replay in enumerate(replays):
            yield ("" if number else "replay"), replay
    limit = f"{_MORE_TIME * result.seconds_per_plant:g}"
    again = [plant.id for plant in result.plants if not plant.caught]
    commands = []
    if again:
        named = " ".join(f"--plant {name}" for name in again)
        end = f"--backend {result.backend} --seed {result.seed} --seconds-per-plant {limit}"
        commands.append(f"python -m harness museum {named} {end}")
    commands += [
        f"python -m harness verify --subject {PREFIX}:{control.id} --backend {result.backend} --seed {control.seed} "
        f"--examples {result.examples_per_control} --seconds {limit}"
        for control in result.controls
        if control.verdict == "unknown"
    ]
    for number, command in enumerate(commands):
        yield ("" if number else "once more"), command


def _uncaught(plant: PlantOutcome) -> str:
    return "undecided" if plant.undecided else "NOT CAUGHT"


def _told(plant: PlantOutcome) -> str:
    return "" if plant.failure is None else f"{plant.failure.property}@{plant.failure.stage}"


def _after(found: FoundAfter | None) -> tuple[str, str]:
    return ("", "") if found is None else (f"{found.seconds:.2f}", str(found.examples))


def _case(plant: PlantOutcome) -> str:
    size, more = plant.case, "+" if plant.cut_short else ""
    return "" if size is None else f"w{size.world:g} e{size.elements:g} s{size.steps:g}{more}"


def _ran(outcome: Outcome) -> str:
    return f"{count(outcome.examples, 'example')} in {duration(outcome.seconds)}"


def _because(outcome: Outcome) -> str:
    return f": {outcome.reason}" if outcome.reason else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 1 else duration(seconds)


def _share(share: Share) -> str:
    return f"{share.right} of {share.of}{f' ({_percent(share)})' if share.of else ''}"


def _percent(share: Share) -> str:
    """Never 100 % of what is not all."""
    return f"{100 * share.right // share.of} %"


def _labelled(label: str, value: str) -> str:
    return f"  {label:<15} {value}".rstrip()
