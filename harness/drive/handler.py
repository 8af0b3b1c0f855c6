"""What a rank of a campaign's pool runs: import the subject once, then drive scenarios."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from harness.drive import accelerator
from harness.drive.calls import Around, RankDriver
from harness.drive.isolation import Isolation, interrupted
from harness.drive.systems import driver_of
from harness.drive.tasks import CheckSubject, SubjectCheck, SubjectName, decode_task, encode
from harness.drive.trail import Trail
from harness.errors import exception_text
from harness.launch.rank import RankBroken, RankContext
from harness.oracles.order import rule
from harness.scenario.model import Scenario
from harness.subjects.builtin import CONFIGURED, capabilities
from harness.subjects.load import SubjectError, declared, load_class, system_of
from harness.verdict import Property, RankStatus, RankVerdict

# The first optimizer of a process makes torch import its compiler, a second of work. This module is imported before
# ranks are forked: done here, it is done once instead of in every rank.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


class LoadedSubjects:
    """The subjects' classes in this rank, each imported once.

    ``importing`` is entered around each import; ``context``: of the rank, where there is one.
    """

    def __init__(
        self, importing: Callable[[str], AbstractContextManager[None]] | None = None, context: RankContext | None = None
    ) -> None:
        self._context = context
        self._importing = importing or (lambda path: nullcontext())
        self._classes: dict[str, type] = {}

    def load(self, subject: SubjectName) -> type:
        """The class, checked; raises :class:`harness.subjects.load.SubjectError`."""
        if subject.path not in self._classes:
            with self._importing(subject.path):
                self._classes[subject.path] = load_class(subject.path, subject.args)
        return self._classes[subject.path]

    def check(self, subject: SubjectName) -> SubjectCheck:
        """Whether the class can be driven."""
        try:
            cls = self.load(subject)
            problem = None if self._context is None else refused(subject, self._context.device, self._context.world)
            return SubjectCheck(problem, declared(cls), system_of(cls))
        except SubjectError as error:
            return SubjectCheck(str(error))


def refused(subject: SubjectName, device: str, world: int | None) -> str | None:
    """Why our own strategies cannot be built from the user's configuration; None: they can, or the subject is another.

    ``world``: of the ranks that will use it, where that is known.
    """
    if subject.path != CONFIGURED:
        return None
    from harness.subjects import configured  # a rank that never drives this system need not import it

    return configured.problem(subject.config or {}, subject.args, device=torch.device(device), world=world)


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: each task names its subject."""
    accelerator.prepare(context.device)
    trail = Trail(context.directory, context.world, context.rank)
    isolation = Isolation(context.rank, context.rearm)
    subjects = LoadedSubjects(isolation.importing, context)

    def answer(message: bytes) -> bytes:
        task = decode_task(message)
        if isinstance(task, CheckSubject):
            return encode(msgspec.structs.replace(subjects.check(task.subject), versions=accelerator.versions(context)))
        cls = subjects.load(task.subject)
        capable = capabilities(task.subject.path, task.subject.config)

        def build(around: Around) -> RankDriver:
            return driver_of(task.scenario.system)(
                context,
                cls,
                task.subject.args,
                capable,
                task.scenario,
                trail,
                exchanges=task.exchanges,
                inspect=task.inspect,
                around=around,
                rule=rule(task.rule or task.order, task.scenario.seed),
            )

        verdict = run_isolated(isolation, task.subject.path, task.scenario, build)
        payload = encode(verdict)
        if verdict.status is RankStatus.DONE:
            return payload
        # The subject stopped half-way: collectives may be under way. Only before the first of them is the group clean.
        raise RankBroken(payload, reusable=not context.collectives.entries and verdict.recycle is None)

    return answer


def run_driver(driver: RankDriver) -> RankVerdict:
    """Its verdict, also when code of the class's interrupts the harness: a trace function, a handler of a signal."""
    try:
        return driver.run()
    except BaseException as error:
        if not interrupted(error):
            raise
        message = f"code of the class that nobody had called (a signal handler?) raised {exception_text(error)}"
        driver.record.diverge(Property.PROGRESS, message)
        return driver.record.verdict(RankStatus.RAISED, traceback.format_exc())


def run_isolated(
    isolation: Isolation, path: str, scenario: Scenario, build: Callable[[Around], RankDriver]
) -> RankVerdict:
    """Drive a scenario; nothing that the subject does to its process outlasts it.

    Args:
        isolation: Of this rank.
        path: Of the subject.
        scenario: What is driven.
        build: Makes the driver, given what to enter around each call into the subject.
    """
    isolation.begin(path, scenario)
    driver = build(isolation.around)
    verdict = run_driver(driver)
    destroyed = isolation.group_is_gone
    with isolation.around():
        del driver  # the subject with it: what its finaliser does belongs to this scenario
    left = isolation.end(path, scenario)
    verdict = told_of_its_group(verdict, destroyed=destroyed)
    return msgspec.structs.replace(verdict, changed=left.changed, recycle=left.recycle)


def told_of_its_group(verdict: RankVerdict, *, destroyed: bool) -> RankVerdict:
    """The verdict with what a class did to the default group, where that explains why it did not get on."""
    found = verdict.divergence
    if not destroyed or found is None or found.property is not Property.PROGRESS:
        return verdict
    message = f"{found.message} (the class destroyed the default process group)"
    return msgspec.structs.replace(verdict, divergence=msgspec.structs.replace(found, message=message))
