"""Signals and internal errors end the command in an orderly way."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from pathlib import Path

import pytest

from harness.ending import internal_error, interruptible, raise_if_interrupted, without_traceback


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_an_interrupt_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    """A campaign ended by `kill` or a closed terminal writes its partial result as after Ctrl-C."""

    def handler(_number: int, _frame: object) -> None: ...

    before = signal.signal(number, handler)  # the tests may have been started by nohup, with SIGHUP ignored
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


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


def chained() -> str:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise OSError(28, "No space left on device")  # noqa: B904
    except OSError:
        return traceback.format_exc()


@pytest.mark.parametrize("rest", ["", "\nIts output:\nnothing\n" + chained().replace("space", "other")])
def test_of_a_traceback_in_a_message_the_exception_is_left(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a chain, and not what was printed besides; nothing is lost."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = f"rank 0 did not start: {chained()}{rest}"

    line = without_traceback(text)

    [written] = tmp_path.iterdir()
    assert line == f"rank 0 did not start: OSError: [Errno 28] No space left on device (traceback in {written})"
    assert written.read_text() == text


def test_a_message_without_a_traceback_is_left_as_it_is() -> None:
    assert without_traceback("two\n  lines") == "two\n  lines"


def test_a_full_disk_does_not_hide_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert without_traceback(chained()) == "OSError: [Errno 28] No space left on device (no room for its traceback)"


def test_an_interrupt_that_python_lost_is_raised_again_when_asked() -> None:
    """What a handler raises inside a garbage collector's callback is printed and ignored."""
    with interruptible():
        raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()
