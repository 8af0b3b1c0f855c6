"""What a person reads: progress while a campaign runs, and its result. No torch.

Progress goes to stderr: a live bar on a terminal, else a plain line every few seconds. Results are lines of plain text
that are never hard-wrapped, so that a path or a command can be copied whole.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from harness.faults import language
from harness.report.result import Failure, FuzzSummary, Result
from harness.scenario.model import Build, Clip, Discard, Load, Rate, Reload, Scenario, Skip, Values, steps
from harness.scenario.muon import AdaptiveClip, Muon, MuonSettings, Sharding
from harness.scenario.strategy import Strategy
from harness.scenario.systems import PROPERTIES
from harness.verdict import Oracle, RankAccount

LINE_INTERVAL_S = 5.0
OUTPUT_LINES = 20
LAST_COLLECTIVES = 3
LINE_CHARS = 300

_STYLES = {"holds": "bold green", "violated": "bold red", "unknown": "bold yellow"}


class Bounds(Protocol):
    """What progress needs to know of a campaign's options."""

    @property
    def seconds(self) -> float | None: ...  # noqa: D102


class TextConsole(Console):
    """A rich console that writes text as it is: no markup, no highlighting, no wrapping, control characters escaped."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def say(self, text: str = "", style: str = "") -> None:
        """Print one line, or several where ``text`` holds line breaks."""
        self.print(Text(visible(text), style=style))


def visible(text: str) -> str:
    """``text`` with everything that does not print (escapes, control characters) shown as an escape sequence."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.expandtabs(4)
    )


BOUND_LINE = "  bound        no fixed order of addition explains these: right within rounding, not bit for bit"


_SHOWN = {Clip: "clip", Discard: "discard", Skip: "skip", Rate: "new rate", Load: "load", Reload: "reload"}


def describe(scenario: Scenario) -> str:
    """A scenario in a few words: world, sizes, bucket, parts of each step, domain."""
    plans = list(steps(scenario))
    parts = ",".join(str(len(plan.parts)) for plan in plans[:6]) + (",..." if len(plans) > 6 else "")
    extras = [name for kind, name in _SHOWN.items() if _has(scenario, kind)]
    extras += [name for name in ("amsgrad", "maximize") if getattr(scenario.optimizer, name)]
    if any(isinstance(operation, Build) for operation in scenario.operations[1:]):
        extras.append("rebuild")
    if scenario.muon is not None:
        extras += _muon_words(scenario.muon)
    if scenario.strategy is not None:
        extras += _strategy_words(scenario.strategy, scenario.world)
    words = [
        f"world {scenario.world}",
        f"{count(len(scenario.parameters), 'parameter')} of {scenario.numel:,}",
        f"bucket {scenario.bucket:,}",
        f"{count(len(plans), 'step')} ({parts} parts)" if plans else "no step",
        _domain(scenario.values),
        *extras,
        *(f"fault: {language.text(fault)}" for fault in scenario.faults),
    ]
    return ", ".join(words)


def _muon_words(muon: Muon) -> list[str]:
    """What of a Muon scenario is not as plain as can be."""
    sharding, plain = muon.sharding, Sharding()
    marks = muon.marks
    splits = sorted({mark.split for mark in marks if mark.split != "none"})
    uses = sorted({mark.use for mark in marks if mark.use != "once"})
    announced = f" of {count(sharding.accumulate_steps, 'part')}" if sharding.accumulate_steps > 1 else ""
    clip = "adaptive clip" if isinstance(muon.clip, AdaptiveClip) else "clip"
    shown = {
        count(sum(mark.muon for mark in marks), "matrix", "matrices"): True,
        f"cut as {' and '.join(splits)}": bool(splits),
        count(len(muon.colors), "colour"): bool(muon.colors),
        "unfused": not sharding.fused,
        "owners by size": sharding.owner_rule != plain.owner_rule,
        f"overlap{announced}": sharding.comm_overlap,
        "no_sync": muon.no_sync,
        f"two hops over nodes of {sharding.local_world_size}": sharding.two_hop,
        "assigned gradients": muon.backward == "assign",
        f"used {' and '.join(uses)}": bool(uses),
        "main_grad": any(mark.main_grad for mark in marks),
        "skip_missing": sharding.skip_missing,
        "released gradients": sharding.release_gradients,
        "released weights": muon.release_color is not None,
        "fused states": sharding.fuse_optimizer_states,
        clip: muon.clip is not None,
        "other settings": muon.settings != MuonSettings(),
    }
    return [words for words, holds in shown.items() if holds]


_SHARDED = {"none": "replicated", "full": "fully sharded"}


def _strategy_words(strategy: Strategy, world: int) -> list[str]:
    """What of a strategy's scenario is not as plain as can be."""
    places, plain = strategy.places, Strategy(())
    blocks = {place.block for place in places if place.block >= 0}
    mesh = f"mesh {strategy.replicas}x{world // strategy.replicas}"
    treated = [name for name in ("frozen", "plain", "tied", "dedicated") if any(getattr(each, name) for each in places)]
    shown = {
        mesh if strategy.sharding == "hybrid" else _SHARDED.get(strategy.sharding, ""): strategy.sharding != "any",
        count(len(blocks), "block"): True,
        f"reduces in {strategy.reduce}": strategy.sharding != "any",
        f"computes in {strategy.compute}": strategy.sharding != "any" and strategy.compute != plain.compute,
        f"accumulation {strategy.accumulation}": strategy.accumulation != plain.accumulation,
        f"{' and '.join(treated)} parameters": bool(treated),
        "converts itself": strategy.converts and not strategy.bare_root,
        "bare root": strategy.bare_root,
        "offloaded": strategy.offload,
        "unequal start": strategy.unequal_start,
        "other settings of Muon": strategy.muon != MuonSettings(),
    }
    return [words for words, holds in shown.items() if holds]


def _domain(values: Values) -> str:
    forms = ["cancelling"] if values.cancel else []
    if values.special:
        forms.append("inf and nan" if values.nonfinite else "extreme")
    return f"{values.domain.value} ({', '.join(forms)})" if forms else values.domain.value


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3:05``, ``1:02:03``."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressReport:
    """Shows a campaign while it runs; an ``Observer`` of the runner and a context manager.

    On a terminal it keeps one bar that redraws itself, also while one example hangs. Elsewhere it prints the first
    example, then a line whenever ``LINE_INTERVAL_S`` have passed.
    """

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = TextConsole(stream)
        self._clock = clock
        self._began = clock()
        self._last_line: float | None = None
        self._seconds: float | None = None
        self._now = Text(no_wrap=True, overflow="ellipsis", style="dim")
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._task = self._bar.add_task("verify", total=None, rate="starting ranks", left="")
        self._live = live_display(self._console, Group(self._bar, self._now))

    def __enter__(self) -> Self:
        """Start the live bar, if there is one."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the live bar and give the terminal back as it was."""
        if self._live is not None:
            self._live.stop()

    def started(self, options: Bounds) -> None:
        """The campaign begins: time counts from here."""
        self._began = self._clock()
        self._seconds = options.seconds

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        """``done`` of ``total`` examples are judged, ``rate`` a second; ``scenario`` is tried now."""
        speed = f"{rate:.1f} examples/s" if rate > 0 else "starting"
        left = self._left(done, total, rate)
        if self._live is not None:
            self._bar.update(self._task, completed=done, total=total, rate=speed, left=left)
            self._now.plain = visible(describe(scenario))
        elif self._line_is_due():
            self._console.say(", ".join(filter(None, (f"{done}/{total} examples", speed, left, describe(scenario)))))

    def shrinking(self, tried: int, best: Scenario) -> None:
        """A failure was found; ``tried`` smaller candidates were run, ``best`` is the smallest that fails."""
        if self._live is not None:
            self._bar.update(self._task, description="shrink", rate=f"{tried} tried", left="")
            self._now.plain = visible(f"smallest so far: {describe(best)}")
        elif self._line_is_due():
            self._console.say(f"shrinking: {tried} tried, smallest so far: {describe(best)}")

    def note(self, text: str) -> None:
        """A line worth reading now, above the bar."""
        self._console.say(text)

    def _line_is_due(self) -> bool:
        now = self._clock()
        if self._last_line is not None and now - self._last_line < LINE_INTERVAL_S:
            return False
        self._last_line = now
        return True

    def _left(self, done: int, total: int, rate: float) -> str:
        """Time left, by whichever ends the campaign first: its examples or its seconds."""
        bounds = []
        if rate > 0:
            bounds.append((total - done) / rate)
        if self._seconds is not None:
            bounds.append(self._seconds - (self._clock() - self._began))
        return f"{duration(min(bounds))} left" if bounds else ""


def result_lines(result: Result, *, campaign: bool = True) -> list[tuple[str, str]]:
    """A result as ``(line, style)`` pairs: the failure last, and its replay command as the very last line.

    ``campaign`` is False for a replay, of which only the verdict and what was checked are shown.
    """
    lines = [(_headline(result), _STYLES[result.verdict])]
    if result.reason is not None:
        lines.append((_labelled("reason", result.reason), ""))
    if campaign:
        for world, examples in sorted(result.examples.per_world.items()):
            lines.append((f"  world {world:<6} {count(examples.count, 'example')}, {examples.rate:.1f}/s", ""))
    lines.append((f"  checked      {_counts(result.properties)}", ""))
    unchecked = [item.value for item in PROPERTIES[result.system] if not result.properties.get(item.value)]
    complete = result.failure is None  # after a failure the campaign stopped: what it left out says nothing
    if unchecked and complete:
        lines.append((f"  not checked  {', '.join(unchecked)}", ""))
    oracles = {item.value: result.oracle.get(item.value, 0) for item in Oracle}
    lines.append((f"  oracles      {', '.join(f'{name} {count:,}' for name, count in oracles.items())}", ""))
    if oracles[Oracle.BOUND.value]:
        lines.append((BOUND_LINE, ""))
    if campaign:
        lines.append((f"  reached      {count(sum(1 for count in result.reached.values() if count), 'situation')}", ""))
        if result.missing and complete:
            lines.append((f"  not reached  {', '.join(result.missing)}", ""))
    if result.margin is not None:
        lines.append((f"  margin       the largest error was {result.margin:.3g} of its bound", ""))
    if result.fuzz is not None:
        lines.extend((line, "") for line in _fuzz_lines(result.fuzz, len(result.missing)))
    if result.changed:
        lines.append((f"  put back     {_counts(result.changed)}", ""))
    if result.recycled:
        times = count(len(result.recycled), "time")
        lines.append((f"  replaced     the ranks of a world, {times}; the first: {result.recycled[0]}", ""))
    if result.failure is not None:
        lines.append(("", ""))
        lines.extend((line, "") for line in failure_lines(result.failure))
    return lines


def _fuzz_lines(fuzz: FuzzSummary, num_missing: int) -> list[str]:
    """What only a fuzz campaign has; of several findings each is a line, the first one is told in full below."""
    before = f", {fuzz.resumed:,} of them before" if fuzz.resumed else ""
    lines = [_labelled("rounds", f"{fuzz.rounds:,}{before}, kept in {fuzz.directory}, ids {fuzz.ids_digest}")]
    if fuzz.required:
        lines.append(_labelled("required", f"{fuzz.required - num_missing} of {fuzz.required} situations reached"))
    if fuzz.slowest is not None:
        lines.append(_labelled("slowest", f"{fuzz.slowest.seconds:.2f} s: {fuzz.slowest.scenario}"))
    if len(fuzz.findings) > 1:
        lines.append(_labelled("findings", str(len(fuzz.findings))))
        for failure in fuzz.findings:
            symptom = f", {failure.symptom}" if failure.symptom else ""
            case = "" if failure.case is None else f": {failure.case}"
            lines.append(_labelled("", _unbroken(f"{failure.property} at {failure.stage}{symptom}{case}")))
            if failure.replay is not None:
                lines.append(_labelled("", f"  {_unbroken(failure.replay)}"))
    return lines


def failure_lines(failure: Failure) -> list[str]:
    """The failure as labelled lines; what does not apply is left out."""
    # What a case or a subject names must not be able to add lines that look like ours; messages may have several.
    rows: list[tuple[str, object]] = [
        ("property", failure.property),
        ("step", failure.step),
        ("stage", failure.stage),
        ("rank", failure.rank),
        ("parameter", _parameter(failure)),
        ("element", _element(failure)),
        ("bucket", failure.bucket),
        ("owner", None if failure.owner is None else f"rank {failure.owner}"),
        ("expected", _value(failure.expected, failure.expected_bits)),
        ("actual", _value(failure.actual, failure.actual_bits, failure.ulps)),
        ("mismatches", None if failure.mismatches is None else count(failure.mismatches, "element")),
        ("pattern", failure.pattern),
        ("inputs", failure.inputs),
        ("symptom", failure.symptom),
        ("message", None if failure.message is None else "\n".join(map(_cut, failure.message.split("\n")[:10]))),
        ("scenario", failure.scenario),
    ]
    lines = ["failure"]
    for label, value in rows:
        if value is not None:
            lines.append(_labelled(label, str(value)))
    lines.extend(line for account in failure.ranks or () for line in _account(account))
    if failure.output and failure.output.strip():
        lines.extend(_output(failure.output))
    if failure.case is not None:
        lines.append(_labelled("case", _unbroken(failure.case)))
    if failure.test is not None:
        # To be copied: at the left margin. Whatever a case names is escaped in it.
        lines.append(_labelled("test", "paste this into a file of tests:"))
        lines.extend(["", *failure.test.splitlines(), ""])
    if failure.replay is not None:
        lines.append(_labelled("replay", _unbroken(failure.replay)))
    return lines


def _parameter(failure: Failure) -> str | None:
    if failure.parameter is None:
        return None
    name = _unbroken(failure.parameter)
    return name if failure.index is None else f"{name} (number {failure.index} of the list)"


def _element(failure: Failure) -> str | None:
    if failure.element is None:
        return None
    return f"{failure.element}" if failure.offset is None else f"{failure.element} (offset {failure.offset:,} of all)"


def _account(account: RankAccount) -> list[str]:
    """How one rank ended and where it was, in two or three lines; the cause is marked."""
    place = account.stage if account.step is None else f"step {account.step}, {account.stage}"
    label = f"rank {account.rank}{' !' if account.cause else ''}"
    lines = [_labelled(label, f"{place}: {_headline_of(account.end)}")]
    if account.last_collectives:
        lines.append(_labelled("", f"called {', '.join(account.last_collectives[-LAST_COLLECTIVES:])}"))
    if account.where:
        lines.append(_labelled("", f"at {account.where}"))
    return lines


def _headline_of(end: str) -> str:
    return _cut(end.strip().partition("\n")[0])


def _cut(line: str) -> str:
    """A line that may be of any length; all of it is in the JSON."""
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}... ({len(line):,} characters)"


def listing_lines(listing: Mapping[str, Mapping[str, str] | Sequence[str]]) -> list[str]:
    """Titled lists; a mapping's values are shown beside its names."""
    lines: list[str] = []
    for title, entries in listing.items():
        lines.append(f"{title}:")
        if isinstance(entries, Mapping):
            width = max(map(len, entries), default=0)
            lines.extend(f"  {name:<{width}}  {summary}" for name, summary in entries.items())
        else:
            lines.extend(f"  {name}" for name in entries)
    return lines


def print_result(stream: IO[str], result: Result, *, campaign: bool = True) -> None:
    """Print :func:`result_lines` to ``stream``, coloured where it is a terminal."""
    console = TextConsole(stream)
    for line, style in result_lines(result, campaign=campaign):
        console.say(line, style)


def _headline(result: Result) -> str:
    examples = result.examples
    worlds = ",".join(map(str, result.worlds))
    discarded = f", {examples.discarded:,} discarded" if examples.discarded else ""
    rate = f" ({result.examples_per_second:.1f}/s)" if examples.run > 1 else ""
    ran = f"{count(examples.run, 'example')} in {duration(result.seconds)}{rate}{discarded}"
    verdict = f"{result.verdict}, interrupted" if result.interrupted else result.verdict
    simulated = f" ({result.order} order, {result.schedule} schedule)" if result.order is not None else ""
    where = f"{result.backend}{simulated}, world {worlds}"
    return f"{verdict}: {_unbroken(result.subject)} on {where}, {ran}, seed {result.seed}"


def _value(value: float | str | None, bits: str | None, ulps: int | None = None) -> str | None:
    if value is None:
        return None
    shown = repr(value) if isinstance(value, float) else str(value)
    details = [] if bits is None else [f"bits {bits}"]
    if ulps is not None:
        details.append(f"{count(ulps, 'ulp')} off")
    return f"{shown} ({', '.join(details)})" if details else shown


def _unbroken(text: str) -> str:
    return text.replace("\n", "\\n")


def _labelled(label: str, value: str) -> str:
    return f"  {label:<12} " + value.rstrip("\n").replace("\n", "\n" + " " * 15)


def _output(output: str) -> list[str]:
    printed = output.rstrip().splitlines()
    left_out = len(printed) - OUTPUT_LINES
    head = f"the last {OUTPUT_LINES} of {len(printed)} lines from the ranks" if left_out > 0 else "from the ranks"
    return [_labelled("output", f"{head}:")] + [f"    | {_cut(line)}" for line in printed[-OUTPUT_LINES:]]


def _counts(counts: dict[str, int]) -> str:
    order = Counter({name: count for name, count in counts.items() if count})
    return ", ".join(f"{name} {count:,}" for name, count in order.items()) or "nothing"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 round``, ``2 rounds``; ``1 matrix``, ``2 matrices``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"


def _has(scenario: Scenario, kind: type) -> bool:
    return any(isinstance(operation, kind) for operation in scenario.operations)


def live_display(console: Console, shown: RenderableType) -> Live | None:
    """What redraws itself on a terminal, and leaves nothing there; None elsewhere."""
    if not _is_terminal(console.file):
        return None
    return Live(
        shown, console=console, refresh_per_second=5, transient=True, redirect_stdout=False, redirect_stderr=False
    )


def _is_terminal(stream: IO[str]) -> bool:
    """Whether a stream can show what redraws itself."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
