"""What a rank of a campaign's pool runs: import the subject once, then drive scenarios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.drive.driver import Driver
from harness.drive.tasks import CheckSubject, SubjectCheck, SubjectName, decode_task, encode
from harness.drive.trail import Trail
from harness.launch.rank import RankBroken, RankContext
from harness.subjects.load import SubjectError, capabilities, load_class
from harness.verdict import RankStatus

# The first optimizer of a process makes torch import its compiler, a second of work. This module is imported before
# ranks are forked: done here, it is done once instead of in every rank.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def start(context: RankContext, setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that answers this rank's tasks. ``setup`` is not used: each task names its subject."""
    trail = Trail(context.directory, context.world, context.rank)
    loaded: dict[str, type] = {}

    def load(subject: SubjectName) -> Callable[..., Any]:
        if subject.path not in loaded:
            loaded[subject.path] = load_class(subject.path, subject.args)
        return loaded[subject.path]

    def answer(message: bytes) -> bytes:
        task = decode_task(message)
        if isinstance(task, CheckSubject):
            try:
                load(task.subject)
            except SubjectError as error:
                return encode(SubjectCheck(str(error)))
            return encode(SubjectCheck(None))
        subject = task.subject
        cls = load(subject)
        verdict = Driver(context, cls, subject.args, capabilities(subject.path), task.scenario, trail).run()
        payload = encode(verdict)
        if verdict.status is RankStatus.DONE:
            return payload
        # The subject stopped half-way: collectives may be under way. Only before the first of them is the group clean.
        raise RankBroken(payload, reusable=not context.collectives.entries)

    return answer
