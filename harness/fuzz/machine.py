"""A state machine that draws what is done with a sharded optimizer, one operation after another.

Most bugs of such a system need a sequence: a discard before a spill, a skipped step before a larger bucket. Hypothesis
chooses each rule knowing which ones are possible, turns rules off for whole runs, and leaves out one at a time when it
makes a failure smaller.

A run is one scenario, which goes to the ranks when it is over. Nothing is decided between two rules by what ranks
answer: which rules are possible follows from the rules before, and what ranks must answer after each of them from the
model. Ranks check every operation when they carry it out, so nothing is lost, and the scenario is what can be saved,
replayed and run beside others. What must be true after each rule (what waits on a rank, and how often it spilled) is
worked out here a second time, from what was done since the last step, so that the oracle that ranks are held to is
checked too.

With some rules turned off a run must still do something. So a step of which nothing waits begins with a part, and a
part for which there is no place begins another step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import SearchStrategy, runner

from harness.fuzz.swarm import Feature, narrowed
from harness.oracles.intake import IntakeModel
from harness.scenario import aims
from harness.scenario.aims import FREE, Clipping, Nones
from harness.scenario.generate import strategy
from harness.scenario.model import (
    CONTRACT,
    Build,
    Clip,
    Discard,
    Extension,
    Load,
    Operation,
    Part,
    Rate,
    Scenario,
    Skip,
    Step,
    check,
)
from harness.scenario.space import Beginning, Choices, draw_beginning, expected_norm

MAX_PARTS = aims.NUM_PARTS[-1]
RULES = 24
FEW_RULES = 8
"""Operations in a run; a third or a quarter of them end a step."""


class ScenarioFailed(AssertionError):  # noqa: N818  (a test that fails, not an error of the harness)
    """Ranks found a violation in what a run of the machine did."""


class Pattern(NamedTuple):
    """Which gradients of a part are None; masks, of which bit i stands for every rank or parameter i modulo 8."""

    nones: Nones = Nones.NOTHING
    ranks: int = 0
    parameters: int = 0

    def missing(self, world: int, num_parameters: int) -> tuple[tuple[int, ...], ...]:
        """For each rank the parameters whose gradient is None."""
        everything = range(num_parameters)
        if self.nones is Nones.ALL:
            return (tuple(everything),) * world
        some = tuple(index for index in everything if self.parameters >> index % 8 & 1)
        if self.nones is Nones.ALL_RANKS:
            return (some,) * world
        on_rank = {Nones.NOTHING: (), Nones.SOME: some, Nones.RANKS: tuple(everything)}[self.nones]
        return tuple(on_rank if self.ranks >> rank % 8 & 1 else () for rank in range(world))


_PATTERNS = (Nones.NOTHING,) * 6 + (Nones.SOME, Nones.SOME, Nones.RANKS, Nones.ALL_RANKS, Nones.ALL)


def _pattern(choices: Choices) -> Pattern:
    nones = choices.of(_PATTERNS)
    if nones in (Nones.NOTHING, Nones.ALL):
        return Pattern(nones)
    ranks = 0 if nones is Nones.ALL_RANKS else choices.number(1, 255)
    return Pattern(nones, ranks, 0 if nones is Nones.RANKS else choices.number(1, 255))


def _factor(choices: Choices) -> float:
    """Of the expected norm: what the gradient is clipped to."""
    clipping = choices.of((Clipping.ACTIVE, Clipping.INACTIVE))
    return choices.of(aims.FACTORS[clipping])


def _request(choices: Choices) -> int:
    return choices.number(1, choices.of(aims.REQUESTS))


class _Waiting:
    """What waits on one rank, and how often it spilled since the system was built."""

    def __init__(self) -> None:
        self.announced: list[bool] = []  # of each part with a gradient, since the last step ended: more
        self.spills = 0

    def part(self, more: bool, any_gradient: bool) -> None:
        if not any_gradient:
            return
        spilled = self.spilled
        self.announced.append(more)
        self.spills += self.spilled and not spilled

    @property
    def spilled(self) -> bool:
        return len(self.announced) > 1 or self.announced == [True]


class OptimizerMachine(RuleBasedStateMachine):
    """See the module; :func:`state_machine` makes a class of it that knows what to do with a scenario."""

    worlds: ClassVar[tuple[int, ...]] = (1,)
    bucket: ClassVar[int | None] = None
    extension: ClassVar[Extension] = CONTRACT
    off: ClassVar[frozenset[Feature]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self._handled = sys.exc_info()[1]
        self.beginning: Beginning | None = None
        self.operations: list[Operation] = []
        self.parts: list[Part] = []  # of the step that is not finished
        self.clipped = False
        self.waiting: list[_Waiting] = []
        self.intake: list[IntakeModel] = []

    def examine(self, scenario: Scenario) -> bool:
        """Whether a scenario fails."""
        raise NotImplementedError

    def beginnings(self) -> SearchStrategy[Beginning]:
        """What a run can begin with."""

        def make(choices: Choices) -> Beginning:
            world = choices.of(sorted(set(self.worlds)))
            seed = choices.number(0, 2**31)
            aim = narrowed(FREE, self.off)
            return draw_beginning(choices, world, aim, seed, self.bucket, self.extension, most_parts=MAX_PARTS)

        return strategy(make)

    # --- which rules are possible

    def _has(self, feature: Feature) -> bool:
        return feature not in self.off

    def _between(self) -> bool:
        """Between two steps."""
        return not self.parts

    def _may_end(self) -> bool:
        """Nothing more was announced. Where it was and never comes, only a discard is certain to be harmless."""
        return not self.parts or not self.parts[-1].more

    def _may_go_on(self) -> bool:
        """Another part of the step has its place."""
        if not self.parts:
            return True
        if self.clipped or len(self.parts) == MAX_PARTS or not self._has(Feature.SEVERAL_PARTS):
            return False
        return self.parts[-1].more or self._has(Feature.LIES)

    def _may_announce(self) -> bool:
        """What is announced may come, or be discarded."""
        waiting = len(self.parts) if self._may_go_on() else 0
        several = self._has(Feature.SEVERAL_PARTS) and waiting < MAX_PARTS - 1
        return several or self._has(Feature.DISCARDS)

    # --- rules

    @initialize(beginning=runner().flatmap(lambda self: self.beginnings()))
    def build(self, beginning: Beginning) -> None:
        """Construct the system and its optimizer."""
        self.beginning = beginning
        self._built(beginning.world, beginning.request)

    @rule(pattern=strategy(_pattern))
    def part(self, pattern: Pattern) -> None:
        """Backward on every rank, and collect: the last part of its step, as announced."""
        self._part(False, pattern)

    @rule(pattern=strategy(_pattern))
    @precondition(lambda self: self._may_announce())
    def part_before_others(self, pattern: Pattern) -> None:
        """The same, with more announced."""
        self._part(True, pattern)

    @rule(factor=strategy(_factor))
    @precondition(lambda self: self.parts and self._may_end() and not self.clipped and self._has(Feature.CLIPS))
    def clip(self, factor: float) -> None:
        """Clip this step's gradient."""
        beginning = self._begun()
        norm = expected_norm(beginning.values, beginning.parameters, self.parts)
        self.operations.append(Clip(factor * (norm + 1e-6)))
        self.clipped = True

    @rule()
    @precondition(lambda self: self._may_end())
    def step(self) -> None:
        """Reduce, update, gather."""
        self._end(Step())

    @rule()
    @precondition(lambda self: self.parts and self._may_end() and self._has(Feature.SKIPS))
    def skip(self) -> None:
        """Reduce and leave it at that."""
        self._end(Skip())

    @rule()
    @precondition(lambda self: self.parts and not self.clipped and self._has(Feature.DISCARDS))
    def discard(self) -> None:
        """Forget what was collected."""
        self._end(Discard())

    @rule(lr=strategy(lambda choices: choices.of(aims.LRS)))
    @precondition(lambda self: self._between() and self._has(Feature.RATES))
    def change_rate(self, lr: float) -> None:
        """Another learning rate from here on."""
        self.operations.append(Rate(lr))

    @rule(version=strategy(lambda choices: choices.number(0, 3)))
    @precondition(lambda self: self._between() and self.extension.refresh and self._has(Feature.LOADS))
    def load(self, version: int) -> None:
        """Other weights, which the masters are made from."""
        self.operations.append(Load(version))

    @rule(request=strategy(_request))
    @precondition(lambda self: self._between() and self._has(Feature.REBUILDS))
    def rebuild(self, request: int) -> None:
        """Construct the system anew, with another bucket size where none is given."""
        numel = sum(parameter.numel for parameter in self._begun().parameters)
        fewest = -(-numel // aims.MAX_BUCKETS)
        self._built(self._begun().world, self.bucket or max(request, fewest))

    # --- what must be true after each

    @invariant()
    def models_agree(self) -> None:
        """What ranks will be held to is what was done since the last step."""
        for rank, (waiting, model) in enumerate(zip(self.waiting, self.intake, strict=True)):
            said, wanted = (model.has_grad, model.spills), (bool(waiting.announced), waiting.spills)
            if said != wanted:
                raise RuntimeError(
                    f"internal error: the intake model of rank {rank} says has_grad, spills = {said}, expected {wanted}"
                )

    def teardown(self) -> None:
        """Send what was done to the ranks, unless the run was broken off."""
        if sys.exc_info()[1] is not self._handled or self.beginning is None:
            return
        scenario = self.scenario()
        if self.examine(scenario):
            raise ScenarioFailed(f"a run of {len(scenario.operations)} operations at world {scenario.world} fails")

    def scenario(self) -> Scenario:
        """What was done, as a scenario; the last step is finished, and one follows what stands between steps."""
        if self.parts or not isinstance(self.operations[-1], Step | Skip | Discard):
            self._finish()
        begun = self._begun()
        operations = tuple(self.operations)
        scenario = Scenario(begun.world, begun.seed, begun.parameters, begun.values, begun.optimizer, operations)
        problem = check(scenario)
        if problem is not None:
            raise RuntimeError(f"internal error of the state machine: {problem}")
        return scenario

    # --- what rules do

    def _begun(self) -> Beginning:
        if self.beginning is None:
            raise RuntimeError("internal error of the state machine: a rule before the first build")
        return self.beginning

    def _built(self, world: int, request: int) -> None:
        self.operations.append(Build(request))
        self.waiting = [_Waiting() for _ in range(world)]
        self.intake = [IntakeModel() for _ in range(world)]

    def _part(self, more: bool, pattern: Pattern) -> None:
        if not self._may_go_on():
            self._finish()
        self._collect(more, pattern if self._has(Feature.NONES) else Pattern())

    def _collect(self, more: bool, pattern: Pattern) -> None:
        world, num_parameters = self._begun().world, len(self._begun().parameters)
        first = len(self.parts) * world
        missing = pattern.missing(world, num_parameters)
        part = Part(more=more, contributors=tuple(range(first, first + world)), none=missing)
        self.parts.append(part)
        self.operations.append(part)
        for waiting, model, none in zip(self.waiting, self.intake, missing, strict=True):
            waiting.part(more, len(none) < num_parameters)
            model.part(more, len(none) < num_parameters)

    def _finish(self) -> None:
        """End the step in the plainest way there is."""
        if not self._may_end() and self._has(Feature.DISCARDS):
            self._end(Discard())
            return
        if not self._may_end():
            self._collect(False, Pattern())
        self._end(Step())

    def _end(self, operation: Step | Skip | Discard) -> None:
        if not self.parts:
            self._collect(False, Pattern())
        for waiting, model in zip(self.waiting, self.intake, strict=True):
            waiting.announced = []
            if isinstance(operation, Discard):
                model.discard()
            else:
                model.reduce()
        self.operations.append(operation)
        self.parts, self.clipped = [], False


def state_machine(
    examine: Callable[[Scenario], bool],
    *,
    worlds: Sequence[int],
    bucket: int | None = None,
    extension: Extension = CONTRACT,
    off: frozenset[Feature] = frozenset(),
) -> type[OptimizerMachine]:
    """A state machine for ``run_state_machine_as_test``, or, by its attribute ``TestCase``, for pytest.

    Args:
        examine: whether a scenario fails; or it raises, for a message of its own.
        worlds: numbers of ranks to choose from.
        bucket: fixes the requested bucket size (elements).
        extension: what beyond the contract's space may be drawn.
        off: what no run has.
    """
    given_worlds, given_bucket, given_extension, given_off = tuple(worlds), bucket, extension, off

    class Machine(OptimizerMachine):
        worlds = given_worlds
        bucket = given_bucket
        extension = given_extension
        off = given_off

        def examine(self, scenario: Scenario) -> bool:
            return examine(scenario)

    return Machine
