"""What a worker says when the subjects that must fail do not, and when they could not be run at all."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness import canary
from harness.evaluate import Conclusion, Evaluation, UndecidedError
from harness.launch.wire import Channel, Kind
from harness.museum import messages, worker


def answers(monkeypatch: pytest.MonkeyPatch, answer: Evaluation | UndecidedError) -> None:
    """All subjects are found to be so."""

    def evaluate(*_: object) -> Evaluation:
        if isinstance(answer, UndecidedError):
            raise answer
        return answer

    monkeypatch.setattr(canary, "Evaluator", lambda *_: SimpleNamespace(evaluate=evaluate))


NO_RANKS = UndecidedError("its zygote process has ended")
PASSES = Evaluation(Conclusion.HOLDS)


def test_only_a_subject_that_passes_shows_that_the_harness_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = None
    answers(monkeypatch, PASSES)
    with pytest.raises(canary.BrokenHarnessError, match="the harness is broken: canary-bit"):
        canary.check_canaries(pool, 2)
    answers(monkeypatch, NO_RANKS)
    with pytest.raises(UndecidedError, match="its zygote process has ended") as raised:
        canary.check_canaries(pool, 2)
    assert raised.type is UndecidedError


@pytest.mark.parametrize(("answer", "kind"), [(PASSES, "broken"), (NO_RANKS, "undecided")])
def test_a_museum_goes_on_with_another_worker_when_ranks_end_while_they_are_checked(
    answer: Evaluation | UndecidedError, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers(monkeypatch, answer)
    monkeypatch.setattr(worker, "start_pool", lambda *_: nullcontext())
    monkeypatch.setattr(worker.process, "die_with_parent", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        setup = messages.Setup(parent=os.getpid(), backend="sim", worlds=(1, 2), report=str(tmp_path))
        Channel(ours).send(Kind.TASK, msgspec.msgpack.encode(setup))
        worker._serve(Channel(theirs))
        theirs.shutdown(socket.SHUT_WR)
        frame = Channel(ours).next_frame()

    assert frame is not None
    said = messages.decode_report(frame.payload)
    assert isinstance(said, messages.Trouble)
    assert said.kind == kind
