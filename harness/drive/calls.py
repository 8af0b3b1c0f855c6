"""Driving any system on one rank: calls into the subject, and what becomes of a scenario in the end."""

from __future__ import annotations

import dataclasses
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch

from harness.drive.record import Record
from harness.drive.shared import Shared
from harness.drive.trail import Trail
from harness.errors import exception_text
from harness.faults.inject import Injector, stay_silent
from harness.launch.rank import RankContext
from harness.oracles.order import Rule, gloo
from harness.scenario.model import Scenario
from harness.subjects.builtin import Capabilities
from harness.verdict import Property, RankStatus, RankVerdict

Around = Callable[[], AbstractContextManager[None]]
"""Gives what is entered around each call into the subject."""


class SubjectRaisedError(Exception):
    """A call into the subject raised; ``unsupported`` when it was NotImplementedError ("outside my space")."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(f"{call} raised {exception_text(error)}")
        self.unsupported = isinstance(error, NotImplementedError)
        self.detail = "".join(traceback.format_exception(error))


class PeerLostError(SubjectRaisedError):
    """A collective of the harness's own failed: another rank is no longer there."""


class InterfaceLacksError(Exception):
    """The built subject lacks an attribute of the contract, or one has the wrong type or shape."""


class CannotGoOnError(Exception):
    """A divergence was recorded after which the step cannot be carried out."""


def reference_to(subject: object) -> weakref.ref[object] | None:
    """A weak reference, which says whether the subject is gone; None where its class allows none."""
    try:
        return weakref.ref(subject)
    except TypeError:
        return None


class _SubjectCall:
    """What is around one call into the subject. Not a generator: this is entered dozens of times in a scenario."""

    __slots__ = ("_around", "_call", "_driver")

    def __init__(self, driver: RankDriver, call: str) -> None:
        self._driver = driver
        self._call = call

    def __enter__(self) -> None:
        driver = self._driver
        driver.record.move()  # Every call of a slow class shows that it makes progress.
        try:
            if driver.faults is not None:
                driver.faults.subject_called()
            self._around = driver.around()
            self._around.__enter__()
        except BaseException as error:
            raise self._raised(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._around.__exit__(kind, error, trace)
        except BaseException as other:
            raise self._raised(other) from other
        if error is not None:
            raise self._raised(error) from error
        self._driver.record.move()

    def _raised(self, error: BaseException) -> SubjectRaisedError:
        return SubjectRaisedError(f"{self._driver.cls.__name__}.{self._call}", error)


class RankDriver(ABC):
    """One scenario on one rank. :meth:`run` never raises for what the subject does."""

    def __init__(
        self,
        context: RankContext,
        cls: Callable[..., Any],
        args: dict[str, Any],
        capabilities: Capabilities,
        scenario: Scenario,
        trail: Trail,
        *,
        exchanges: bool = True,
        inspect: bool = False,
        around: Around = nullcontext,
        shared: Shared | None = None,
        rule: Rule = gloo,
        silence: Callable[[], NoReturn] = stay_silent,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """``exchanges``, ``inspect``: see :class:`harness.drive.tasks.RunScenario`; ``around`` each subject's call.

        ``shared``: of all ranks of this scenario in this process, where that is not this one alone. ``rule``: how the
        backend adds. ``silence``: what a rank does that is never to send its verdict; ``sleep``: one that is to be late
        (seconds).
        """
        self.rule = rule
        self.inspect = inspect
        self.context = context
        self.exchanges = exchanges
        self.around = around
        self.cls = cls
        self.args = args
        self.scenario = scenario
        self.shared = shared or Shared(scenario)
        self.rank = context.rank
        self.device = torch.device(context.device)
        # Which kernel multiplies on a GPU depends on shapes, on alignment, and on what else is in the batch.
        exact_products = capabilities.exact_products and self.device.type == "cpu"
        self.capabilities = dataclasses.replace(capabilities, exact_products=exact_products)
        self.record = Record(context, scenario, trail)
        self.faults = Injector(scenario.faults, self.rank, self.record, sleep) if scenario.faults else None
        self._silence = silence
        if self.faults is not None:
            context.collectives.intercept = self.faults.intercept

    @abstractmethod
    def drive(self) -> None:
        """Carry out all operations of the scenario, and finish the record."""

    def run(self) -> RankVerdict:
        """Drive the scenario to its end, or to the first exception of the subject."""
        verdict = self._run()
        if self.faults is not None and self.faults.mutes():
            self._silence()
        return verdict

    def _run(self) -> RankVerdict:
        try:
            self.drive()
        except SubjectRaisedError as raised:
            self.record.diverge(Property.PROGRESS, str(raised))  # of a refusal: where, should other ranks not refuse
            status = RankStatus.UNSUPPORTED if raised.unsupported else RankStatus.RAISED
            return self.record.verdict(status, raised.detail)
        except CannotGoOnError:
            return self.record.verdict(RankStatus.RAISED, None)
        except InterfaceLacksError as lacks:
            return self.record.verdict(RankStatus.INTERFACE, str(lacks))
        return self.record.verdict(RankStatus.DONE, None)

    def _subject(self, call: str) -> AbstractContextManager[None]:
        """Around all that runs code of the subject's, in its environment; whatever is raised there is its affair."""
        return _SubjectCall(self, call)

    @contextmanager
    def _blamed(self, call: str) -> Iterator[None]:
        """Around what the harness does with things of the subject's, in its own environment."""
        try:
            if self.faults is not None:
                self.faults.subject_called()
            yield
        except BaseException as error:  # a rank is never interrupted from outside: this too is the subject's
            raise SubjectRaisedError(f"{self.cls.__name__}.{call}", error) from error

    @contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        """Around the harness's own collectives, which are not in the log: what fails there is that a peer has gone."""
        try:
            with self.context.collectives.paused():
                yield
        except RuntimeError as error:
            raise PeerLostError(f"the harness's own exchange of {what}", error) from error
