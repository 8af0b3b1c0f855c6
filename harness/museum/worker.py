"""A worker of a museum: a process with warm ranks that runs the campaigns it is told to, one after the other.

It knows nothing of plants and labels. It ends when the museum's process does, when told to (SIGINT: what it has seen
so far is reported), or when the harness fails, which it says first.
"""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from pathlib import Path

from harness.canary import BrokenHarnessError, check_canaries
from harness.ending import without_traceback
from harness.errors import UsageError, exception_text
from harness.evaluate import Evaluator, Pool, UndecidedError, start_pool
from harness.launch import crew, process
from harness.launch.pool import PoolError
from harness.launch.wire import Channel
from harness.museum.messages import Done, Order, Progress, Ready, RunCampaign, Setup, Trouble, decode_order
from harness.report.console import describe
from harness.runner import CampaignOptions, run_campaign
from harness.scenario.model import Scenario
from harness.subjects.source import SubjectSource

_REPORT_EVERY_S = 0.25


def main(descriptor: int) -> None:
    """Do what arrives on this socket until it is closed."""
    crew.serve(descriptor, "zero2-museum", _serve)


def _serve(channel: Channel) -> None:
    setup = _next(channel)
    if not isinstance(setup, Setup):
        return
    process.die_with_parent(setup.parent)
    try:
        with ExitStack() as stack:
            pool = stack.enter_context(start_pool(setup.backend))

            @functools.cache
            def other() -> Pool:
                return stack.enter_context(start_pool("gloo" if setup.backend == "sim" else "sim"))

            try:
                check_canaries(pool, setup.worlds[0])
            except BrokenHarnessError as error:
                crew.say(channel, Trouble("broken", without_traceback(str(error))))
                return
            crew.say(channel, Ready())
            while isinstance(order := _next(channel), RunCampaign):
                try:
                    _prepare(setup, order, pool)
                    result = run_campaign(_options(setup, order), _Observer(channel), pool, other)
                except UsageError as error:
                    crew.say(channel, Done(None, str(error)))
                    continue
                crew.say(channel, Done(result))
                if result.interrupted:
                    return
    except (UndecidedError, PoolError) as error:
        crew.say(channel, Trouble("undecided", without_traceback(str(error))))
    except Exception as error:
        crew.say(channel, Trouble("undecided", f"internal error: {exception_text(error)}"))
        raise  # its traceback goes to the worker's log


def _next(channel: Channel) -> Order | None:
    frame = channel.next_frame()
    return None if frame is None else decode_order(frame.payload)


def _prepare(setup: Setup, order: RunCampaign, pool: Pool) -> None:
    """Have the ranks of every world there, whatever the class before has done to them: they are no part of a search."""
    evaluator = Evaluator(_subject(order), pool)
    for world in setup.worlds:
        evaluator.prepare(world)


def _subject(order: RunCampaign) -> SubjectSource:
    return SubjectSource(order.given, order.absolute)


def _options(setup: Setup, order: RunCampaign) -> CampaignOptions:
    return CampaignOptions(
        subject=_subject(order),
        worlds=setup.worlds,
        backend=setup.backend,
        seed=order.seed,
        examples=order.examples,
        seconds=order.seconds,
        bucket=None,
        parameters=None,
        report=Path(setup.report),
        timeout_s=None,
        canaries=False,  # checked once, by this worker
    )


class _Observer:
    """Tells the museum's process how far a campaign is, now and then."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said = 0.0
        self._begun = 0

    def started(self, options: CampaignOptions) -> None: ...

    def example(self, done: int, total: int, world: int, scenario: Scenario, rate: float) -> None:
        self._begun = done + 1
        self._say(describe(scenario))

    def shrinking(self, tried: int, best: Scenario) -> None:
        self._say(f"{tried} smaller ones tried; {describe(best)}")

    def note(self, text: str) -> None: ...  # what matters of it is part of the failure's message

    def _say(self, doing: str) -> None:
        now = time.monotonic()
        if now - self._said >= _REPORT_EVERY_S:
            self._said = now
            crew.say(self._channel, Progress(self._begun, doing))
