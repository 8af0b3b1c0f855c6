"""What a rank of a campaign's pool runs: import the subject once, then drive scenarios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.drive.driver import Driver
from harness.drive.tasks import CheckSubject, SubjectCheck, SubjectName, decode_task, encode
from harness.drive.trail import Trail
from harness.launch.rank import RankBroken, RankContext
from harness.subjects.builtin import capabilities
from harness.subjects.load import SubjectError, load_class
from harness.verdict import RankStatus

# The first optimizer of a process makes torch import its compiler, a second of work. This module is imported before
# ranks are forked: done here, it is done once instead of in every rank.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


class LoadedSubjects:
    """The subjects' classes in this rank, each imported once."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def load(self, subject: SubjectName) -> Callable[..., Any]:
        """The class, checked; raises :class:`harness.subjects.load.SubjectError`."""
        if subject.path not in self._classes:
            self._classes[subject.path] = load_class(subject.path, subject.args)
        return self._classes[subject.path]

    def check(self, subject: SubjectName) -> SubjectCheck:
        """Whether the class can be driven."""
        try:
            self.load(subject)
        except SubjectError as error:
            return SubjectCheck(str(error))
        return SubjectCheck(None)


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: each task names its subject."""
    trail = Trail(context.directory, context.world, context.rank)
    subjects = LoadedSubjects()

    def answer(message: bytes) -> bytes:
        task = decode_task(message)
        if isinstance(task, CheckSubject):
            return encode(subjects.check(task.subject))
        subject = task.subject
        cls = subjects.load(subject)
        driver = Driver(
            context,
            cls,
            subject.args,
            capabilities(subject.path),
            task.scenario,
            trail,
            exchanges=task.exchanges,
            inspect=task.inspect,
        )
        verdict = driver.run()
        payload = encode(verdict)
        if verdict.status is RankStatus.DONE:
            return payload
        # The subject stopped half-way: collectives may be under way. Only before the first of them is the group clean.
        raise RankBroken(payload, reusable=not context.collectives.entries)

    return answer
