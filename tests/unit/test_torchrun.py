"""What is read of torchrun's variables, what is left for it to read, and how a stall is told from afar."""

from __future__ import annotations

import builtins
import dataclasses
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from harness import ending
from harness.errors import UsageError
from harness.launch import board, machine, process
from harness.launch.activity import Reading
from harness.launch.attempt import Vigil
from harness.launch.board import Board, BoardGone, Heart, Pulses
from harness.launch.job import require_alive
from harness.launch.orders import Sighting
from harness.launch.outcome import Activity, PoolError
from harness.launch.post import keep_left, left_by
from harness.launch.torchrun import Launch, launched, leave_word
from harness.launch.watchdog import TICK_S, Stall
from tests.spreading import environment_of


def given(rank: int = 4, world: int = 6, **others: str) -> dict[str, str]:
    return environment_of(rank, world, 29500, num_nodes=2) | others


def test_the_place_in_a_job_of_two_machines() -> None:
    found = launched(given() | {"HOME": "/", "TORCHELASTIC_ERROR_FILE": "/x"})
    assert found == Launch(
        rank=4,
        world=6,
        local_world=3,
        node=1,
        num_nodes=2,
        host="127.0.0.1",
        port=29500,
        hosts_store=False,
        attempt=0,
        prefix="zero2-harness/a-test/0",
        environment=given(),
    )


def test_a_restarted_job_uses_other_names_and_the_first_process_may_have_to_keep_the_store() -> None:
    again = launched(given(0, TORCHELASTIC_RESTART_COUNT="2", TORCHELASTIC_USE_AGENT_STORE="False"))
    assert again is not None
    assert (again.attempt, again.prefix, again.hosts_store) == (2, "zero2-harness/a-test/2", True)
    other = launched(given(1, TORCHELASTIC_USE_AGENT_STORE="False"))
    assert other is not None
    assert not other.hosts_store


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "somewhere", "MASTER_PORT": "1"},
        process.rank_environment(1, 3, 29500),
    ],
    ids=["nothing", "a-batch-system", "a-rank-of-ours"],
)
def test_who_else_sets_a_rank_is_not_torchrun(environment: dict[str, str]) -> None:
    assert launched(environment) is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("RANK", "x", "expected a whole number from 0 to 5, got 'x'"),
        ("RANK", "6", "expected a whole number from 0 to 5, got '6'"),
        ("RANK", "-1", "got '-1'"),
        ("RANK", "٣", "got '٣'"),
        ("WORLD_SIZE", "0", "expected a whole number from 1, got '0'"),
        ("WORLD_SIZE", None, "expected a whole number from 1, it is not set"),
        ("WORLD_SIZE", "9" * 5000, "RANK"),
        ("LOCAL_WORLD_SIZE", "7", "from 1 to 6"),
        ("LOCAL_RANK", "3", "from 0 to 2"),
        ("GROUP_RANK", "2", "from 0 to 1"),
        ("GROUP_WORLD_SIZE", "", "from 1 to 6"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
        ("MASTER_ADDR", "", "the address of the launcher's store"),
        ("TORCHELASTIC_RESTART_COUNT", "one", "TORCHELASTIC_RESTART_COUNT"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_line(name: str, text: str | None, says: str) -> None:
    environment = given()
    environment.pop(name)
    if text is not None:
        environment[name] = text
    if len(text or "") > 1000:
        assert launched(environment) is not None  # absurd, but a number
        return
    with pytest.raises(UsageError) as raised:
        launched(environment)
    message = str(raised.value)
    assert message.startswith(f"torchrun's {name}: ")
    assert says in message
    assert "unset TORCHELASTIC_RUN_ID" in message


def test_ranks_of_several_machines_choose_their_interface_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    apart, together = process.pool_environment({}, one_machine=False), process.pool_environment({})
    assert (apart["GLOO_SOCKET_IFNAME"], together["GLOO_SOCKET_IFNAME"]) == ("eth7", "lo")
    assert "TORCHELASTIC_RUN_ID" not in apart


def test_torchrun_reads_the_first_word_that_is_left_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    leave_word("to nobody")
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    leave_word("violated: rank 1 was killed")
    leave_word("something that comes of it")
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(path))
    assert "traceback : violated: rank 1 was killed\n" in str(ChildFailedError("harness", {0: failure}))


# --- a stall ----------------------------------------------------------------------------------------------------------


def sighting(number: int, progress: int = 0, doing: Activity | None = Activity.BLOCKED, cpu_s: float = 0.0) -> Sighting:
    """``doing`` None: it was not looked at so closely."""
    reading = None if doing is None else Reading(doing, cpu_s)
    return Sighting(0, number, progress, looked=doing is not None, reading=reading)


def watched(ranks: int, seconds: float, **changes: int) -> Stall | None:
    """Ranks that wait; ``progress``: how many of them get on at every look."""
    vigil, now_s = Vigil(5.0, 8.0, 100.0), 100.0
    for number in range(round(seconds / TICK_S)):
        now_s += TICK_S
        moving = changes.get("progress", 0)
        seen = {rank: sighting(number, number if rank < moving else 0) for rank in range(ranks)}
        if (stall := vigil.tick(now_s, seen)) is not None:
            return stall
    return None


def test_ranks_that_all_wait_have_stalled_wherever_they_are() -> None:
    assert watched(3, 4.9) is None
    stall = watched(3, 6.0)
    assert stall is not None
    assert stall.rank is None


def test_one_that_gets_on_is_enough_wherever_it_is() -> None:
    assert watched(3, 60.0, progress=1) is None


def test_what_is_not_seen_anew_counts_for_nothing() -> None:
    """A process that does not get to look, or whose word does not arrive, must not be taken for a rank that waits."""
    vigil, now_s = Vigil(5.0, 8.0, 100.0), 100.0
    for number in range(400):
        now_s += TICK_S
        assert vigil.tick(now_s, {0: sighting(number), 1: sighting(0)}) is None


def test_one_that_computes_is_told_by_its_processor_time_and_what_ranks_did_is_known() -> None:
    vigil, now_s, stall = Vigil(5.0, 2.0, 100.0), 100.0, None
    for number in range(20):
        now_s += TICK_S
        seen = {0: sighting(number), 1: sighting(number, doing=Activity.COMPUTING, cpu_s=number * TICK_S)}
        stall = stall or vigil.tick(now_s, seen)
    assert stall is not None
    assert stall.rank == 1
    assert vigil.doing() == {0: Activity.BLOCKED, 1: Activity.COMPUTING}


def test_one_that_was_not_looked_at_closely_excuses_the_others() -> None:
    vigil, now_s = Vigil(5.0, 8.0, 100.0), 100.0
    for number in range(100):
        now_s += TICK_S
        assert vigil.tick(now_s, {0: sighting(number), 1: sighting(number, doing=None)}) is None


# --- what ranks leave -------------------------------------------------------------------------------------------------


def test_what_a_rank_leaves_takes_the_place_of_what_it_left_before(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "trail-world3-rank1").write_bytes(b"{}\n" + bytes(4096))
    (there / "world3-rank1.log").write_bytes(b"printed")
    for name in ("trail-world3-rank1", "other-rank1", "trail-world3-rank11", "other-rank0"):
        (here / name).write_bytes(b"old")

    files = left_by(there, 1)
    assert files == {"trail-world3-rank1": b"{}\n"}
    keep_left(here, 1, files | {"../../escaped-rank1": b"no"})

    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        "trail-world3-rank1": b"{}\n",
        "trail-world3-rank11": b"old",
        "other-rank0": b"old",
        "escaped-rank1": b"no",
    }


# --- the board --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launch() -> Iterator[Launch]:
    """A job of two whose store this process keeps."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    found = launched(environment_of(0, 2, store.port))
    assert found is not None
    yield found
    del store


def test_messages_of_any_size_are_found_under_their_names(launch: Launch) -> None:
    one, other = Board(launch), Board(launch)
    for size in (0, 1, 4 * 2**20 - 1, 4 * 2**20, 9 * 2**20):
        message = bytes([size % 251]) * size
        one.put("name", message)
        assert other.wait(["name"], 30.0)
        assert other.get("name") == message
        assert other.take("name") == message
        assert one.get("name") is one.get("name.0") is None


def test_what_was_put_up_is_taken_down_whole(launch: Launch) -> None:
    one, other = Board(launch), Board(launch)
    one.put("name", bytes(9 * 2**20))
    assert other.wait(["name", "name.2"], 30.0)
    one.remove("name")
    assert [other.get(name) for name in ("name", "name.0", "name.1", "name.2")] == [None] * 4


def test_whoever_waits_is_told_whether_all_is_there(launch: Launch) -> None:
    one, other = Board(launch), Board(launch)
    one.put("a", b"")
    assert other.wait(["a"], 30.0)
    assert not other.wait(["a", "b"], 0.01)
    assert not other.wait(["b"], 0.0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def asked(self, pulses: Pulses, seconds: float, beating: Board | None = None) -> list[tuple[int, float | None]]:
        """Who is said to be lost in so many seconds, asked at each beat."""
        found = []
        for _ in range(int(seconds / board._BEAT_S)):
            self.now_s += board._BEAT_S
            if beating is not None:
                beating.count(board._beat_of(0), 1)
            lost = pulses.lost()
            if lost is not None:
                found.append(lost)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(board, "time", clock)
    monkeypatch.setattr(machine, "patience", lambda: 1.0)
    return clock


def test_a_process_that_lives_has_a_pulse_and_one_that_does_not_is_lost(launch: Launch, clock: Clock) -> None:
    """Only after a while: before it has begun longer."""
    pulses, silent_s = Pulses(Board(launch), [0]), board._SILENT_S
    assert 2 * silent_s < board._BEGIN_S
    assert clock.asked(pulses, 2 * silent_s) == []  # it has not begun
    assert clock.asked(pulses, 3 * silent_s, beating=Board(launch)) == []
    clock.now_s += 3 * silent_s  # this process was stopped
    assert clock.asked(pulses, silent_s) == []
    (rank, for_s), *_ = clock.asked(pulses, silent_s)
    assert rank == 0
    assert for_s is not None
    assert for_s > silent_s


def test_a_process_that_goes_away_by_itself_is_missed_at_once(launch: Launch, clock: Clock) -> None:
    """Not one that leaves because it is over."""
    pulses = Pulses(Board(launch), [0])
    with Heart(launch):
        pass
    assert Board(launch).count(board._beat_of(0)) == 1  # it has begun
    assert clock.asked(pulses, board._SILENT_S) == []
    with pytest.raises(KeyboardInterrupt), Heart(launch):
        raise KeyboardInterrupt
    assert clock.asked(pulses, board._BEAT_S) == [(0, None)]

    with pytest.raises(PoolError, match="rank 0: the process that torchrun launched for it has left"):
        require_alive(Pulses(Board(launch), [0]))


def test_nobody_waits_for_long_where_no_store_is(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch, which would, is not asked."""
    monkeypatch.setattr(board, "_CONNECT_S", 0.3)
    monkeypatch.setattr(c10d, "TCPStore", None)
    with pytest.raises(BoardGone, match=r"the store of the launcher, 127\.0\.0\.1:1, does not answer: .*refused"):
        Board(dataclasses.replace(launch, port=1))


def test_a_signal_waits_until_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it could not be imported again, to tell the others that it is over."""
    imported = []
    real = builtins.__import__

    def importing(name: str, *others: Any) -> Any:
        if name == "torch.distributed":
            signal.raise_signal(signal.SIGTERM)
            imported.append(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", importing)
    with ending.interruptible(), pytest.raises(KeyboardInterrupt), board._quiet_torch():
        raise AssertionError("it went on")
    assert imported
