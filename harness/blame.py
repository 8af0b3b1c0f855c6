"""Who is to blame when not every rank sent a verdict, and what each rank was doing: from what the ranks left behind.

The earliest failure is the cause; what other ranks then suffer (a closed connection, a wait without end) is told as its
consequence. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from msgspec.structs import replace

from harness.drive.trail import Left
from harness.launch.outcome import Activity, Outcome, RankEnd, RankReport, Told
from harness.oracles import judge, sequence
from harness.report.evidence import Place, State
from harness.verdict import (
    STAGE_ORDER,
    Collective,
    Divergence,
    Handed,
    Property,
    RankAccount,
    RankStatus,
    RankVerdict,
    Stage,
)

_LAST_CALLS = 8
_DIED = (RankEnd.EXITED, RankEnd.KILLED, RankEnd.SPOILT)
_STUCK = (RankEnd.STALLED, RankEnd.TIMED_OUT)


def cause(
    outcome: Outcome, found: Divergence | None, verdicts: Mapping[int, RankVerdict], lefts: Callable[[int], Left]
) -> Divergence:
    """The divergence to report for a run in which at least one rank sent no verdict.

    A difference that was seen before comes first, in values or in the sequence of collectives. Then the rank that ended
    by itself or raised first; then what a simulated world knows; last a rank that made no progress, of several the one
    that the others wait for.

    Args:
        outcome: Of the task.
        found: What the verdicts and trails show together (:func:`harness.oracles.judge.merge`).
        verdicts: Of the ranks that sent one.
        lefts: What a rank left behind.
    """
    if found is not None and found.property is not Property.PROGRESS:
        return found
    silent = [report for report in outcome.ranks if report.reply is None]
    first = None if outcome.first_failed is None else outcome.ranks[outcome.first_failed]
    raised = None if found is None or found.rank is None else outcome.ranks[found.rank]
    if raised is not None and raised.rank in verdicts and judge.peer_lost(verdicts[raised.rank]):
        raised = None
    died = [report for report in silent if report.end in _DIED]
    if died and not (raised is not None and first is not None and first.rank == raised.rank):
        return _ended(first if first in died else died[0], lefts)
    if raised is not None and found is not None:
        return found
    if not silent and found is not None:
        return found
    everyone = {
        report.rank: _told(verdicts[report.rank]) if report.rank in verdicts else lefts(report.rank)
        for report in outcome.ranks
    }
    if outcome.told is not None:
        return _told_by_the_world(outcome.told, everyone, silent)
    gave_up = [rank for rank, verdict in verdicts.items() if judge.peer_lost(verdict)]
    return _stuck(silent, everyone, gave_up)


def accounts(
    outcome: Outcome,
    found: Divergence | None,
    verdicts: Mapping[int, RankVerdict],
    lefts: Callable[[int], Left],
) -> tuple[RankAccount, ...]:
    """What is known of each rank of a run that failed."""
    return tuple(_account(report, found, verdicts.get(report.rank), lefts, outcome.world) for report in outcome.ranks)


def _account(
    report: RankReport,
    found: Divergence | None,
    verdict: RankVerdict | None,
    lefts: Callable[[int], Left],
    world: int,
) -> RankAccount:
    left = lefts(report.rank) if verdict is None else _told(verdict)
    calls = left.collectives
    last = calls[-_LAST_CALLS:]
    first_number = len(calls) - len(last) + 1
    stack = Stack.of(report.stacks)
    return RankAccount(
        rank=report.rank,
        cause=found is not None and found.rank == report.rank,
        end=_end_of(report, verdict),
        step=left.step,
        stage=left.stage.value,
        num_collectives=len(calls),
        last_collectives=tuple(
            f"{sequence.ordinal(first_number + index)}: {sequence.name(call, world)} ({_place(call)})"
            for index, call in enumerate(last)
        ),
        where=None if stack is None else stack.subject_frame,
        stacks=report.stacks,
        output="\n".join(filter(None, (report.output, verdict.detail if verdict is not None else None))) or None,
    )


def place(report: RankReport, verdict: RankVerdict | None, left: Left | None) -> Place:
    """How far a rank came: where its own first difference is, where it stopped, or all the way.

    Args:
        report: Of the rank.
        verdict: What it sent; None: nothing.
        left: What it left behind, if it sent nothing.
    """
    if verdict is None:
        left = left or Left()
        stopped: State = "ended" if report.end in _DIED else "hung"
        return Place(report.rank, left.step, left.stage.value, stopped)
    found, raised = verdict.divergence, verdict.status in (RankStatus.RAISED, RankStatus.UNSUPPORTED)
    if found is None:
        return Place(report.rank, None, Stage.BUILD.value, "raised" if raised else "agreed")
    # What raised, or could not go on, behind a difference is not what was seen first.
    state: State = "raised" if raised and found.property is Property.PROGRESS else "differs"
    if judge.peer_late(verdict):
        state = "hung"
    return Place(report.rank, found.step, found.stage.value, state)


def _told(verdict: RankVerdict) -> Left:
    """The same of a rank that sent its verdict: that says more than the trail."""
    calls, found = verdict.collectives, verdict.divergence
    step, stage = (found.step, found.stage) if found is not None else (None, Stage.BUILD)
    if found is None and calls:
        step, stage = calls[-1].step, Stage(calls[-1].stage or Stage.BUILD.value)
    return Left(step, stage, calls, finished=verdict.status is RankStatus.DONE)


def _end_of(report: RankReport, verdict: RankVerdict | None) -> str:
    if verdict is None:
        return report.error or report.end.value
    if verdict.status is RankStatus.DONE:
        return "sent its verdict"
    if judge.peer_late(verdict):
        return "gave up waiting for another rank"
    if judge.peer_lost(verdict):
        return "lost its connection to another rank"
    found = verdict.divergence
    if found is not None and found.property is Property.PROGRESS:
        return found.message.partition("\n")[0]
    said = (verdict.detail or "").strip().rpartition("\n")[2]
    return f"{verdict.status.value}: {said}" if said else verdict.status.value


def _place(call: Collective) -> str:
    stage = call.stage or "build"
    return stage if call.step is None else f"{stage} of step {call.step}"


# --- a wrong value ----------------------------------------------------------------------------------------------------


def attributed(found: Divergence, verdicts: Sequence[RankVerdict]) -> Divergence:
    """The same divergence at the rank whose doing it is, where that can be told; ``found`` as it is where not.

    A wrong sum shows on the rank that owns it, and is the fault of the one that contributed a wrong value. A wrong
    weight that all ranks see alike was handed out by its owner.

    Args:
        found: In a scenario whose ranks looked at what they handed over (``RunScenario.inspect``).
        verdicts: Of all ranks of that run.
    """
    notes = {
        verdict.rank: [note for note in verdict.handed if (note.step, STAGE_ORDER[note.stage]) <= found.when]
        for verdict in verdicts
    }
    guilty = [rank for rank, noted in notes.items() if noted]
    if guilty and len(guilty) < len(verdicts):
        return _at_the_giver(found, {rank: notes[rank] for rank in guilty}, len(verdicts))
    if found.property is Property.WEIGHTS and found.owner is not None and found.stage is Stage.GATHER:
        own = [verdict.divergence for verdict in verdicts]
        if all(other is not None and _same_place(other, found) for other in own):
            return replace(
                found, rank=found.owner, message=f"{found.message}; every rank has that from rank {found.owner}"
            )
    return found


def raced(found: Divergence, race: Divergence) -> Divergence:
    """A difference in values that comes of a race, told as that race: where it shows is kept."""
    return replace(
        found,
        property=race.property,
        stage=race.stage,
        step=race.step,
        rank=race.rank,
        message=f"{race.message}; {found.message}",
    )


def _at_the_giver(found: Divergence, notes: Mapping[int, Sequence[Handed]], world: int) -> Divergence:
    """``notes``: what each rank that handed over something wrong did; the first of these ranks is named."""
    rank, (note, *_) = next(iter(notes.items()))
    places = [(other.step, other.stage, other.bucket) for other in notes[rank]]
    if note.instead is None or (note.step, note.stage, note.instead) not in places:  # what it gave twice is no swap
        return replace(found, rank=rank, message=f"{found.message}: rank {rank} {note.message}")
    sound = sequence.ranks_text([other for other in range(world) if other not in notes])
    too = f" ({sequence.ranks_text(list(notes)[1:])} handed over something wrong too)" if len(notes) > 1 else ""
    return Divergence(
        property=Property.TRAFFIC,
        stage=note.stage,
        step=note.step,
        rank=rank,
        bucket=note.bucket,
        message=f"rank {rank} {note.message}, unlike {sound}{too}: two collectives of equal size in another order, "
        "which the backend does not notice",
    )


def _same_place(one: Divergence, other: Divergence) -> bool:
    places = [(each.property, each.when, each.parameter, each.element, each.actual_bits) for each in (one, other)]
    return places[0] == places[1]


# --- a rank that ended ------------------------------------------------------------------------------------------------


def _ended(report: RankReport, lefts: Callable[[int], Left]) -> Divergence:
    left = lefts(report.rank)
    after = ""
    if left.finished:
        after = ", after the last stage"
    elif left.collectives:
        number, call = sequence.ordinal(len(left.collectives)), left.collectives[-1]
        after = f", after it had called its {number} collective, {sequence.name(call, _world_of(call))}"
    return Divergence(
        property=Property.PROGRESS,
        step=left.step,
        stage=left.stage,
        rank=report.rank,
        message=f"rank {report.rank} sent no verdict: {report.error or report.end.value}{after}",
    )


def _world_of(call: Collective) -> int:
    return max(call.group, default=0) + 1


# --- ranks that do not get on -----------------------------------------------------------------------------------------


def _told_by_the_world(told: Told, everyone: Mapping[int, Left], silent: Sequence[RankReport]) -> Divergence:
    """Where the rank is that is to blame; where nobody can tell, the one that got the least far."""
    ranks = told.ranks
    if not ranks and told.kind == "deadlock":
        suspects = _suspects(silent, everyone) if silent else []
        ranks = (suspects[0].rank,) if len(suspects) == 1 else ()
    at = min(ranks or everyone, key=lambda rank: (_when(everyone[rank]), rank))
    return Divergence(
        property=Property.TRAFFIC if told.kind == "mismatch" else Property.PROGRESS,
        step=everyone[at].step,
        stage=everyone[at].stage,
        rank=at if ranks else None,
        message=told.message,
    )


def _when(left: Left) -> tuple[int, int]:
    return (-1 if left.step is None else left.step, STAGE_ORDER[left.stage])


def _stuck(silent: Sequence[RankReport], everyone: Mapping[int, Left], gave_up: Sequence[int]) -> Divergence:
    world = len(everyone)
    done = sorted(everyone.keys() - {report.rank for report in silent})
    if (unmet := _unmet(silent, done, everyone)) is not None:
        return unmet
    suspects = _suspects(silent, everyone)
    report = suspects[0]
    left = everyone[report.rank]
    named = len(suspects) < len(silent) or len(silent) == 1
    waiting = [rank for rank in (other.rank for other in silent) if rank not in {one.rank for one in suspects}]
    who = sequence.ranks_text([one.rank for one in suspects])
    did = "finished the scenario but sent no verdict" if left.finished else "made no progress"
    of_whom = f"rank {report.rank}: " if len(suspects) > 1 else ""
    text = f"{who} {did}: {of_whom}{_why(report, gave_up)}"
    missed = _missed(report.rank, everyone, world)
    if missed and waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        whose = "their" if len(suspects) > 1 else "its"
        text += f"; {sequence.ranks_text(waiting)} {wait} for {whose} {missed}"
    elif not named and left.collectives:
        number, call = sequence.ordinal(len(left.collectives)), left.collectives[-1]
        text += f"; all of them called their {number} collective, {sequence.name(call, world)}"
    if report.end is RankEnd.STALLED and report.activity is not Activity.STOPPED:
        text += " (--stall gives more time)"
    return Divergence(
        property=Property.PROGRESS,
        step=left.step,
        stage=left.stage,
        rank=report.rank if named else None,
        message=text,
    )


def _unmet(silent: Sequence[RankReport], done: Sequence[int], everyone: Mapping[int, Left]) -> Divergence | None:
    """Where some ranks came to the end and the others all wait in a collective that these did not call (one that is
    not in the logs): the fewer are wrong, of as many nobody can tell which."""
    stacks = [Stack.of(report.stacks) for report in silent]
    waiting = all(
        report.end in _STUCK and stack and stack.in_collective for report, stack in zip(silent, stacks, strict=True)
    )
    if not done or not waiting or len(done) > len(silent) or not all(everyone[rank].finished for rank in done):
        return None
    ranks = [report.rank for report in silent]
    left = everyone[ranks[0]]
    wait = "waits" if len(ranks) == 1 else "wait"
    return Divergence(
        property=Property.PROGRESS,
        step=left.step,
        stage=left.stage,
        rank=done[0] if len(done) < len(silent) else None,
        message=f"{sequence.ranks_text(done)} finished the scenario while {sequence.ranks_text(ranks)} {wait} in a "
        f"collective for which nobody comes{_at(stacks[0])}",
    )


def _at(stack: Stack | None) -> str:
    return "" if stack is None or stack.subject_frame is None else f" ({stack.subject_frame})"


def _why(report: RankReport, gave_up: Sequence[int]) -> str:
    if report.end is RankEnd.ABANDONED and gave_up:
        return f"it was still running when {sequence.ranks_text(gave_up)} gave up waiting or lost another rank"
    if report.end is RankEnd.TIMED_OUT:
        if report.error and "connection" in report.error:
            return f"it {report.error}"  # and was given up for that, with time left
        return "it was still running when its time was up (--timeout gives more)"
    if report.end in (RankEnd.STALLED, RankEnd.DEADLOCKED):
        return f"it {report.error or 'waits for what never comes'}"
    return report.error or report.end.value


def _missed(rank: int, everyone: Mapping[int, Left], world: int) -> str:
    """The next collective of a rank by what the others called: ``3rd collective, all_gather bf16[48]``."""
    position = len(_common(everyone[rank]))
    for other in everyone.values():
        calls = _common(other)
        if len(calls) > position:
            return f"{sequence.ordinal(position + 1)} collective, {sequence.name(calls[position], world)}"
    return ""


def _common(left: Left) -> list[Collective]:
    return [call for call in left.collectives if call.kind not in sequence.POINT_TO_POINT]


def _suspects(silent: Sequence[RankReport], everyone: Mapping[int, Left]) -> list[RankReport]:
    """Of the ranks that did not end those that the others wait for; all of them where nothing tells them apart.

    Each rule in turn, the first that holds for some and not for all: stopped by a signal; called fewer collectives
    than others, who wait for the next; done with the scenario (so it waits for nobody); computing while the others
    wait; not in a collective.
    """
    fewest = min(len(_common(everyone[report.rank])) for report in silent)
    most = max(len(_common(left)) for left in everyone.values())
    rules: tuple[Callable[[RankReport], bool], ...] = (
        lambda report: report.end is not RankEnd.ABANDONED,
        lambda report: report.activity is Activity.STOPPED,
        lambda report: fewest < most and len(_common(everyone[report.rank])) == fewest,
        lambda report: everyone[report.rank].finished,
        lambda report: report.activity is Activity.COMPUTING,
        lambda report: (stack := Stack.of(report.stacks)) is not None and not stack.in_collective,
    )
    left = list(silent)
    for rule in rules:
        chosen = [report for report in left if rule(report)]
        left = chosen or left
        if len(left) == 1:
            break
    return left


# --- stacks -----------------------------------------------------------------------------------------------------------

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)
_HARNESS = re.compile(r"/harness/(launch|drive|faults(?!/museum)|sim)/")  # an exhibit of the museum is a subject
_SIM = re.compile(r"/harness/sim/")


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    @property
    def in_torch(self) -> bool:
        return "-packages/torch/" in self.file

    @property
    def drives(self) -> bool:
        """Whether only the thread that drives a rank has such a frame: of its process, or of its simulated world."""
        return bool(_SIM.search(self.file)) or (self.function == "_serve" and bool(_HARNESS.search(self.file)))

    @property
    def in_subject(self) -> bool:
        standard = "/lib/python3" in self.file and "-packages/" not in self.file
        wrapper = self.file.endswith("-packages/typing_extensions.py")  # of torch's deprecated functions
        return not (standard or wrapper or self.in_torch or self.file.startswith("<") or _HARNESS.search(self.file))


def without_harness(stacks: str) -> str:
    """Text without frames of the harness, which begin all stacks, and without the list of modules after a crash."""
    return "\n".join(
        line for line in stacks.splitlines() if not _is_harness(line) and not line.startswith("Extension modules:")
    )


def _is_harness(line: str) -> bool:
    frame = _FRAME.fullmatch(line)
    return frame is not None and (frame["file"] == "<string>" or _HARNESS.search(frame["file"]) is not None)


@dataclass(frozen=True)
class Stack:
    """The frames of the thread in which a rank drives its subject, innermost first (as faulthandler writes them)."""

    frames: tuple[_Frame, ...]

    @staticmethod
    def of(text: str | None) -> Stack | None:
        """Found in the stacks of all threads of a rank; None where they do not show it."""
        for block in re.split(r"^(?=Thread |Current thread )", text or "", flags=re.MULTILINE):
            frames = tuple(_Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(block))
            if any(frame.drives for frame in frames):
                return Stack(frames)
        return None

    @property
    def in_collective(self) -> bool:
        """Whether it is inside a function of torch.distributed, or waits for one to complete."""
        inner = self.frames[:4]
        return any(frame.in_torch and "/distributed/" in frame.file for frame in inner) or (
            bool(inner) and inner[0].function == "wait"
        )

    @property
    def subject_frame(self) -> str | None:
        """``zero_master.py:210 in reduce_scatter``: the innermost frame that is neither torch's nor the harness's."""
        frame = next((frame for frame in self.frames if frame.in_subject), None)
        return None if frame is None else f"{PurePath(frame.file).name}:{frame.line} in {frame.function}"
