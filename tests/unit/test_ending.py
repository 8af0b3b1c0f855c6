"""Signals and internal errors end the command in an orderly way."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from harness.ending import internal_error, interruptible, raise_if_interrupted


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_an_interrupt_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    """A campaign ended by `kill` or a closed terminal writes its partial result as after Ctrl-C."""
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_second_signal_at_once_does_not_break_off_the_clean_up() -> None:
    """coreutils' `timeout` sends two; after a second they count again, for whoever loses patience."""
    clock = Clock()
    with interruptible(clock):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 0.5
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 1.5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """`nohup` and a shell's `&` ask for that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_internal_error_names_itself_and_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is for the user, the file for the report."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        raise KeyError("lost")
    except KeyError as error:
        line = internal_error(error)
    [written] = tmp_path.iterdir()
    assert line == f"internal error: KeyError: 'lost' (traceback in {written})"
    assert 'raise KeyError("lost")' in written.read_text()


def test_without_a_place_for_the_traceback_it_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Better on the terminal than lost."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert internal_error(ValueError("x")) == "internal error: ValueError: x (traceback above)"
    assert capsys.readouterr().err == "ValueError: x\n"


def test_an_interrupt_that_python_lost_is_raised_again_when_asked() -> None:
    """What a handler raises inside a garbage collector's callback is printed and ignored."""
    with interruptible():
        raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()
