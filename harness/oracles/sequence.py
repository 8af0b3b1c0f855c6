"""Whether all ranks called the same collectives in the same order, and if not, which rank did what.

Most backends notice little of this: gloo pairs whatever comes next, swaps equal buckets without a word, and reports an
error, if any, on ranks that did nothing wrong. The logs of all ranks tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.verdict import STAGE_ORDER, Collective, Divergence, Property, Stage

# Two ranks take different parts in these, so they need not match and their order says nothing about the others.
POINT_TO_POINT = frozenset({"send", "recv", "send_object_list", "recv_object_list"})

# What one rank contributes to these may rightly be longer than what another does.
UNEVEN = frozenset({"all_to_all"})

# What happened once is no habit: a first step may well differ (a barrier, a buffer that is made) from all that follow.
_HABIT_STEPS = 2

LEAVE = "destroy_process_group"
"""What the log calls a rank's leaving a group: no collective, but what the others wait for in vain."""

Implied = Callable[[int | None, str | None], Sequence[tuple[str, str, int]] | None]
"""``(step, stage)`` -> kind, dtype and length of each collective that is called there; None: not known."""


@dataclass(frozen=True)
class Log:
    """What one rank called. ``whole``: it was driven to its end, so what is not there was not called."""

    calls: Sequence[Collective]
    whole: bool


def differences(logs: Sequence[Log], implied: Implied | None = None) -> tuple[list[Divergence], int]:
    """The first difference of each pair of ranks on the groups that hold both, and how many calls were compared.

    Args:
        logs: One a rank, in order.
        implied: What the layout of the system implies, where that is known: tells who is wrong where the ranks are
            evenly divided.
    """
    world = len(logs)
    logs = [Log([call for call in log.calls if call.kind not in POINT_TO_POINT], log.whole) for log in logs]
    keys = [[_key(call) for call in log.calls] for log in logs]
    if all(other == keys[0] for other in keys) and all(len(key[3]) == world for key in keys[0]):
        return [], len(keys[0]) if world > 1 else 0
    found = []
    num_compared = 0
    # In a large world most pairs are like one that was compared before: equal logs, over the same groups.
    alike = [(tuple(key), log.whole) for key, log in zip(keys, logs, strict=True)]
    numbers = {log: number for number, log in enumerate(dict.fromkeys(alike))}
    number_of = [numbers[log] for log in alike]
    members = {call.group: frozenset(call.group) for log in logs for call in log.calls}
    groups_of = {number: {call.group for call in logs[number_of.index(number)].calls} for number in numbers.values()}
    known: dict[tuple[int, int, frozenset[tuple[int, ...]]], tuple[int, Divergence | None]] = {}
    for one in range(world):
        for other in range(one + 1, world):
            pair = number_of[one], number_of[other]
            either = groups_of[pair[0]] | groups_of[pair[1]]
            groups = frozenset(group for group in either if one in members[group] and other in members[group])
            if (*pair, groups) not in known:
                compared, position = _first_difference(logs, one, other, groups)
                comparison = None if position is None else _Comparison(logs, groups, position, implied)
                known[*pair, groups] = compared, None if comparison is None else comparison.divergence()
            compared, divergence = known[*pair, groups]
            num_compared += compared
            if divergence is not None:
                found.append(divergence)
    return found, num_compared


def name(call: Collective, world: int) -> str:
    """``all_gather bf16[48]``, with what is no sum, and with the ranks of its group where these are not all."""
    if call.kind == LEAVE:
        text = f"{LEAVE}()"
    elif call.dtype:
        text = f"{call.kind} {call.dtype}[{call.length}]"
    else:
        text = call.kind
    if call.how:
        text = f"{text} {call.how}"
    return text if call.group == tuple(range(world)) else f"{text} among {ranks_text(call.group)}"


_MAX_LISTED = 12


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``; of very many the first, and how many more."""
    listed = ", ".join(map(str, ranks[:_MAX_LISTED]))
    more = f" and {len(ranks) - _MAX_LISTED} more" if len(ranks) > _MAX_LISTED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``11th``."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}" + {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


_Key = tuple[str, str, int, tuple[int, ...], str]


def _key(call: Collective) -> _Key:
    uneven = call.kind in UNEVEN
    return call.kind, "" if uneven else call.dtype, 0 if uneven else call.length, call.group, call.how


def _first_difference(
    logs: Sequence[Log], one: int, other: int, groups: Collection[tuple[int, ...]]
) -> tuple[int, int | None]:
    """How many calls of two ranks were compared, and the position of the first that differs."""
    left = [_key(call) for call in logs[one].calls if call.group in groups]
    right = [_key(call) for call in logs[other].calls if call.group in groups]
    common = min(len(left), len(right))
    for position in range(common):
        if left[position] != right[position]:
            return position + 1, position
    # A rank that stopped early lacks the rest of its calls for that reason, which is reported as such.
    shorter = one if len(left) < len(right) else other
    if len(left) != len(right) and logs[shorter].whole:
        return common + 1, common
    return common, None


def _when(call: Collective) -> tuple[int, int]:
    stage = Stage(call.stage) if call.stage else Stage.BUILD
    return (-1 if call.step is None else call.step, STAGE_ORDER[stage])


class _Comparison:
    """The calls of all ranks of some groups at the first position where two of them differ."""

    def __init__(
        self, logs: Sequence[Log], groups: Collection[tuple[int, ...]], position: int, implied: Implied | None
    ) -> None:
        self.world = len(logs)
        self.position = position
        self.implied = implied
        members = [rank for rank in range(self.world) if all(rank in group for group in groups)]
        self.calls = {rank: [call for call in logs[rank].calls if call.group in groups] for rank in members}
        # What each called here; None: nothing, though it was driven to its end. Who stopped early takes no part.
        self.here: dict[int, Collective | None] = {}
        for rank in members:
            if position < len(self.calls[rank]):
                self.here[rank] = self.calls[rank][position]
            elif logs[rank].whole:
                self.here[rank] = None

    def divergence(self) -> Divergence:
        by_name: dict[str, list[int]] = defaultdict(list)
        for rank, call in self.here.items():
            by_name["nothing" if call is None else name(call, self.world)].append(rank)
        right, proven = self._right(by_name)
        wrong = sorted((other for other in by_name if other != right), key=lambda other: by_name[other][0])
        odd = ", ".join(f"{ranks_text(by_name[other])} called {other}" for other in wrong)
        whose = "its" if sum(len(by_name[other]) for other in wrong) == 1 else "their"
        others = f"{ranks_text(by_name[right])} called {right}"
        message = f"{odd} as {whose} {ordinal(self.position + 1)} collective while {others}"
        deviant, sound = by_name[wrong[0]][0], by_name[right][0]
        explained = self._explained(deviant, sound) if proven else self._undecided()
        first = min((call for call in self.here.values() if call is not None), key=_when)
        return Divergence(
            property=Property.TRAFFIC,
            stage=Stage(first.stage) if first.stage else Stage.BUILD,
            step=first.step,
            rank=deviant if proven else None,
            expected=right if proven else None,
            actual=wrong[0] if proven else None,
            message=f"{message}: {explained}" if explained else message,
        )

    def _undecided(self) -> str:
        hint = " (three would: --world 3)" if self.world == 2 else ""
        return f"two logs alone do not tell which of them is wrong{hint}"

    def _right(self, by_name: Mapping[str, list[int]]) -> tuple[str, bool]:
        """Which of the calls here is the right one, and whether that is more than a guess."""
        most = sorted(by_name, key=lambda called: (-len(by_name[called]), by_name[called][0]))
        if (right := self._only_right(by_name, self._follows_layout)) is not None:
            return right, True
        if len(by_name[most[0]]) > len(by_name[most[1]]):
            return most[0], True
        right = self._only_right(by_name, self._follows_habit)
        return (most[0], False) if right is None else (right, True)

    def _only_right(self, by_name: Mapping[str, list[int]], judge: Callable[[int], bool | None]) -> str | None:
        """The only call here that ``judge`` finds right on all ranks that made it, all others being wrong."""
        verdicts = {called: {judge(rank) for rank in ranks} for called, ranks in by_name.items()}
        right = [called for called, said in verdicts.items() if said == {True}]
        wrong = [called for called, said in verdicts.items() if said == {False}]
        return right[0] if len(right) == 1 and len(wrong) == len(by_name) - 1 else None

    def _follows_layout(self, rank: int) -> bool | None:
        """Whether a rank's call here is the one that the layout implies; None: that is not known."""
        if self.implied is None:
            return None
        calls = self.calls[rank]
        before = calls[self.position - 1] if self.position else None
        call = self.here[rank]
        if before is not None and (call is None or _when(before) != _when(call)):
            # It had better be done with the stage before this one.
            wanted = self.implied(before.step, before.stage)
            if wanted is not None and len(self._of_stage(rank, before, 0)) != len(wanted):
                return False
        if self._passed_over(before, call):
            return False
        if call is None:
            return True
        wanted = self.implied(call.step, call.stage)
        if wanted is None:
            return None
        number = len([one for one in calls[: self.position] if _when(one) == _when(call)])
        return number < len(wanted) and wanted[number] == (call.kind, call.dtype, call.length) and not call.how

    def _passed_over(self, before: Collective | None, call: Collective | None) -> bool:
        """Whether a stage lies between two calls of a rank, or after its last, in which it should have called."""
        if self.implied is None:
            return False
        stages = list(STAGE_ORDER)
        last = None if call is None else _when(call)
        step, order = (-1, 0) if before is None else _when(before)
        while True:
            order += 1
            if order == len(stages):
                step, order = step + 1, 1  # the construction is no stage of a step
            if last is not None and (step, order) >= last:
                return False
            wanted = self.implied(None if step < 0 else step, stages[order].value)
            if wanted:
                return True
            if wanted is None and step >= 0:
                return False  # beyond the last step

    def _follows_habit(self, rank: int) -> bool | None:
        """Whether a rank calls here what ranks call in that stage of other steps; None: those do not tell."""
        places = {(call.step, call.stage) for call in self.here.values() if call is not None}
        step, stage = min(places, key=lambda place: _when(Collective("", "", 0, (), *place)))
        habits: dict[tuple[_Key, ...], set[int | None]] = defaultdict(set)
        for own in self.calls.values():
            by_step: dict[int | None, list[_Key]] = defaultdict(list)
            for call in own:
                if call.stage == stage:
                    by_step[call.step].append(_key(call))
            last = own[-1].step if own else None
            for at, keys in by_step.items():
                if at not in (step, last):
                    habits[tuple(keys)].add(at)
        if len(habits) != 1:
            return None
        ((usual, others),) = habits.items()
        if len(others) < _HABIT_STEPS:
            return None
        mine = tuple(_key(call) for call in self.calls[rank] if (call.step, call.stage) == (step, stage))
        ended = any(_when(call) > _when(Collective("", "", 0, (), step, stage)) for call in self.calls[rank])
        return mine == usual if ended or self.here[rank] is None else mine == usual[: len(mine)]

    def _of_stage(self, rank: int, call: Collective, position: int) -> list[Collective]:
        """A rank's calls from ``position`` on in the step and stage of ``call``."""
        return [other for other in self.calls[rank][position:] if _when(other) == _when(call)]

    def _explained(self, deviant: int, sound: int) -> str:
        """What kind of mistake this looks like, as words to follow the difference; empty where that cannot be told."""
        call, other = self.here[deviant], self.here[sound]
        rank = f"rank {deviant}"
        if call is not None and call.kind == LEAVE:
            return f"{rank} left the group"
        if call is None:
            return f"{rank} ended without that collective"
        if other is None:
            return f"{rank} called one too many"
        if _when(call) > _when(other):
            return f"{rank} skipped that collective and went on to stage {call.stage}{_of_step(call, other)}"
        if _when(call) < _when(other):
            # Only a layout says how many there should be; else it is its word against that of the others.
            known = self.implied is not None and self.implied(call.step, call.stage) is not None
            doubt = "" if known else ", unless the others left it out"
            return f"{rank} called one too many in stage {call.stage}{doubt}"
        mine = [_key(one) for one in self._of_stage(deviant, call, self.position)]
        theirs = [_key(one) for one in self._of_stage(sound, other, self.position)]
        if mine != theirs and Counter(mine) == Counter(theirs):
            return f"{rank} called the collectives of this stage in another order"
        if theirs[1 : 1 + len(mine)] == mine:
            return f"{rank} skipped that collective"
        if mine[1 : 1 + len(theirs)] == theirs:
            return f"{rank} called one too many"
        return ""


def _of_step(call: Collective, other: Collective) -> str:
    return "" if call.step == other.step else f" of step {call.step}"
