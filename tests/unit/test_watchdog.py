"""What the watchdog decides, on clocks and readings made up for it, and what it reads off the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from harness.launch import activity
from harness.launch.activity import Reading
from harness.launch.outcome import Activity
from harness.launch.rankset import last_stacks
from harness.launch.watchdog import TICK_S, FunctionsSeen, ProcessesSeen, Silence, Stall


class World:
    """Ranks that do what they are told, looked at once every tick."""

    def __init__(self, blocked_s: float = 5.0, computing_s: float = 8.0) -> None:
        self.now_s = 1000.0
        self.cpu_s: dict[int, float] = {}
        self.silence = Silence(blocked_s, computing_s, self.now_s)

    def live(self, seconds: float, step_s: float = TICK_S, **shares: tuple[Activity, float]) -> Stall | None:
        """Until that has passed or it has stalled; ``r0=(activity, share of a processor)``."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            readings = {}
            for name, (doing, share) in shares.items():
                rank = int(name[1:])
                self.cpu_s[rank] = self.cpu_s.get(rank, 0.0) + share * step_s
                readings[rank] = Reading(doing, self.cpu_s[rank])
            stall = self.silence.look(self.silence.passed(self.now_s), readings)
            if stall is not None:
                return stall
        return None


IDLE = (Activity.BLOCKED, 0.0)
BUSY = (Activity.COMPUTING, 1.0)


def test_ranks_that_all_wait_have_stalled_after_the_limit() -> None:
    """Blocked and stopped ones alike; not before."""
    world = World(blocked_s=5.0)

    assert world.live(5.0, r0=IDLE, r1=(Activity.STOPPED, 0.0)) is None
    assert world.live(2 * TICK_S, r0=IDLE, r1=(Activity.STOPPED, 0.0)) == Stall(None, 5.0)


@pytest.mark.parametrize("doing", [(Activity.DEVICE, 0.0), (Activity.COMPUTING, 0.0), BUSY])
def test_one_that_does_something_excuses_those_that_wait(doing: tuple[Activity, float]) -> None:
    """That computes, wants to but gets no processor, or waits for a device."""
    world = World(blocked_s=1.0, computing_s=1e6)

    assert world.live(1000.0, r0=IDLE, r1=doing) is None


def test_looking_again_and_again_is_waiting() -> None:
    """Who polls uses a little of the processor; it takes only a little longer to be found."""
    world = World(blocked_s=5.0)

    stall = world.live(1000.0, r0=(Activity.BLOCKED, 0.1))

    assert stall is not None
    assert stall.rank is None
    assert world.now_s < 1000.0 + 5.0 / 0.9 + 3 * TICK_S


def test_a_rank_that_computes_has_stalled_by_the_time_it_used() -> None:
    """Not by the time that passed: at half a processor it takes twice as long. The one that used most is named."""
    world = World(computing_s=8.0)

    assert world.live(15.0, r0=(Activity.COMPUTING, 0.25), r1=(Activity.COMPUTING, 0.5)) is None
    stall = world.live(2.0, r0=(Activity.COMPUTING, 0.25), r1=(Activity.COMPUTING, 0.5))
    assert stall == Stall(1, 8.0)


def test_a_process_that_a_rank_has_started_may_compute_four_times_longer() -> None:
    """A compiler takes 20 s for one file; what it used in all is said."""
    silence = Silence(5.0, 8.0, 0.0)
    stall = None
    looks = 0
    while stall is None and looks < 1000:
        looks += 1
        used_s = looks * TICK_S
        readings = {0: Reading(Activity.COMPUTING, 1.0, frozenset({7}), used_s), 1: Reading(Activity.BLOCKED, 1.0)}
        stall = silence.look(silence.passed(looks * TICK_S), readings)

    assert stall == Stall(0, 32.0)


def test_of_many_threads_one_counts() -> None:
    """A rank that keeps eight processors busy has no eighth of the time."""
    world = World(computing_s=8.0)

    assert world.live(7.0, r0=(Activity.COMPUTING, 8.0)) is None


def test_whoever_gets_on_is_given_all_the_time_again() -> None:
    """Both counts begin anew."""
    world = World(blocked_s=5.0, computing_s=8.0)

    for _ in range(10):
        assert world.live(4.0, r0=IDLE) is None
        world.silence.broken()
        assert world.live(7.0, r0=BUSY) is None
        world.silence.broken()
    assert world.live(1000.0, r0=IDLE) is not None


def test_what_a_rank_did_is_what_it_did_most_of_the_time() -> None:
    """One that waits is now and then seen running; what was before somebody got on does not count."""
    world = World(blocked_s=1e6, computing_s=1e6)
    assert world.silence.doing(0) is None
    world.live(100.0, r0=BUSY)
    world.silence.broken()
    world.live(4.0, r0=IDLE)
    world.live(2.0, r0=BUSY)

    assert world.silence.doing(0) is Activity.BLOCKED
    assert world.silence.doing(1) is None


def test_the_time_while_nobody_looked_does_not_count() -> None:
    """A parent that was stopped for an hour knows of two ticks of it, of either kind."""
    world = World(blocked_s=5.0, computing_s=8.0)
    world.live(1.0, r0=IDLE, r1=IDLE)

    assert world.live(3600.0, 3600.0, r0=IDLE, r1=IDLE) is None
    assert world.live(3.0, r0=IDLE, r1=IDLE) is None
    world.silence.broken()
    world.live(1.0, r0=BUSY)
    assert world.live(3600.0, 3600.0, r0=BUSY) is None
    assert world.live(3.0, r0=BUSY) is None


def test_time_that_vanishes_is_not_given_back() -> None:
    """A child that somebody else has reaped takes its time out of the sum; what was used stays used."""
    world = World(computing_s=2.0)
    world.live(1.5, r0=BUSY)
    world.cpu_s[0] = 0.0

    assert world.live(1.5, r0=BUSY) is not None


@pytest.mark.parametrize(
    ("rank", "doing", "text"),
    [
        (1, Activity.COMPUTING, "used 8.1 s of processor time without progress"),
        (
            0,
            Activity.BLOCKED,
            "waited without using the processor (no rank made progress while rank 1 used 8.1 s of processor time)",
        ),
        (2, Activity.COMPUTING, "was computing (no rank made progress while rank 1 used 8.1 s of processor time)"),
    ],
)
def test_each_rank_is_told_apart(rank: int, doing: Activity, text: str) -> None:
    """The one that computed, and the others."""
    assert Stall(1, 8.14).describe(rank, doing).startswith(text)


def test_a_stall_of_all_blames_nobody() -> None:
    """Every rank is described alike, by what it did."""
    assert Stall(None, 5.0).describe(0, Activity.STOPPED) == (
        "was stopped by SIGSTOP or a debugger (no rank made progress for 5.0 s)"
    )


def stacks(*functions: str, thread: int = 1) -> str:
    frames = "".join(f'  File "subject.py", line {line} in {name}\n' for line, name in enumerate(functions))
    return f"Thread 0x{thread:016x} (most recent call first):\n{frames}"


def test_new_functions_are_news_and_new_lines_are_not() -> None:
    """The first stacks say nothing yet; a function once seen stays seen until all is forgotten."""
    seen = FunctionsSeen()

    assert not seen.add(0, stacks("f", "main"))
    assert not seen.add(0, stacks("main", "f"))
    assert seen.add(0, stacks("g", "main"))
    assert not seen.add(0, stacks("f", "main"))
    assert not seen.add(0, "")
    assert not seen.add(1, stacks("h"))
    seen.forget()
    assert not seen.add(0, stacks("h"))


def test_the_last_of_several_dumps_is_taken_out() -> None:
    """It has each thread once; what is no dump is left as it is."""
    last = stacks("f", thread=2) + "\n" + stacks("main").replace("Thread", "Current thread")

    assert last_stacks(stacks("main") + "\n" + last) == last
    assert last_stacks(last) == last
    assert last_stacks(last * 3) == last
    assert last_stacks("text") == "text"
    assert last_stacks("") == ""


@contextmanager
def child(code: str) -> Iterator[int]:
    """A process that runs ``code``, after it has said that it begins."""
    command = [sys.executable, "-c", f"import os, subprocess, sys, time; print(flush=True); {code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def becomes(pid: int, doing: Activity) -> bool:
    """Whether a reading of it says so within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if activity.read([pid])[pid].activity is doing:
            return True
        time.sleep(0.01)
    return False


def test_the_kernel_says_what_a_process_does() -> None:
    """Waits, is stopped, computes again; and how much of the processor it has used."""
    with child("time.sleep(1000)") as pid:
        assert becomes(pid, Activity.BLOCKED)
        assert "state S (waiting)" in (activity.in_words(pid) or "")
        os.kill(pid, signal.SIGSTOP)
        assert becomes(pid, Activity.STOPPED)
        assert "state T (stopped by a signal)" in (activity.in_words(pid) or "")
    with child("\nwhile True: pass") as pid:
        assert becomes(pid, Activity.COMPUTING)
        before_s = activity.read([pid])[pid].cpu_s
        deadline = time.monotonic() + 60
        while (after_s := activity.read([pid])[pid].cpu_s) < before_s + 0.1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert after_s >= before_s + 0.1


def test_a_process_not_seen_before_is_news_but_not_for_ever() -> None:
    """The first look only says what there is."""
    seen = ProcessesSeen()

    assert not seen.add(frozenset({1}))
    assert not seen.add(frozenset({1}))
    assert seen.add(frozenset({2}))
    assert not seen.add(frozenset())
    assert sum(seen.add(frozenset({number})) for number in range(3, 1000)) < 200
    seen.forget()
    assert not seen.add(frozenset({5000}))


def test_what_children_do_is_done_by_the_process() -> None:
    """Also what those did that have ended."""
    loop = "subprocess.run([sys.executable, '-c', 'while True: pass'])"
    once = "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.5: pass'])"
    with child(loop) as pid:
        deadline = time.monotonic() + 60
        while not (started := psutil.Process(pid).children()):  # or it would be started after it should be killed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            assert becomes(pid, Activity.COMPUTING)
        finally:
            for grandchild in started:
                grandchild.kill()
    with child(f"{once}; time.sleep(1000)") as pid:
        deadline = time.monotonic() + 60
        while activity.read([pid])[pid].descendants_cpu_s < 0.3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert activity.read([pid])[pid].descendants_cpu_s >= 0.3


def test_an_ended_process_has_no_reading() -> None:
    """Nor words; also while nobody has reaped it."""
    with child("time.sleep(1000)") as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        assert activity.read([pid]) == {}
        assert activity.in_words(pid) is None
    assert activity.read([pid]) == {}


def test_a_handler_is_seen() -> None:
    """Of this process, for a signal that it has a handler for and one that it has none for."""
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert activity.catches(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        assert not activity.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, previous)
