"""States of a process are put back and what piles up is counted, in this very process."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import harness.drive.handler  # noqa: F401 (imports what a rank has imported, which changes filters and environment)
from harness.drive import growth
from harness.drive.growth import Growth, Limits
from harness.drive.isolation import Environment, Isolation, interrupted
from harness.drive.states import STATES, Streams, seed_generators
from harness.errors import UsageError
from harness.scenario import presets
from tests.subjects.rude import RUDE

SCENARIO = presets.campaign(presets.parameters("tiny-mlp"), world=2, bucket=1000, seed=3)[0]
BIG = presets.campaign(presets.parameters("gpt2"), world=2, bucket=2**25, seed=3)[0]
# Not in a process that goes on to run other tests: what they leave cannot be taken back, or the test runner needs it.
ELSEWHERE = {"close streams", "leave a child", "signals", "trace", "profile", "alarm", "block signals", "warnings"}


class Rearmed(list[bool]):
    """The calls of ``rearm``."""

    def __call__(self, lost: bool) -> None:
        self.append(lost)


@contextmanager
def isolated() -> Iterator[Isolation]:
    """Of this process as it is in the body of a test; puts back what a test leaves, also one that fails."""
    made = Isolation(0, lambda lost: None)
    try:
        yield made
    finally:
        made.end("", SCENARIO)


@pytest.mark.parametrize("how", [how for how, act in RUDE.items() if act.changed and how not in ELSEWHERE])
def test_a_state_is_put_back_and_named(how: str) -> None:
    with isolated() as isolation:
        before = [state.read() for state in STATES]
        isolation.begin("", SCENARIO)
        with isolation.around():
            RUDE[how].act()
        left = isolation.end("", SCENARIO)

        assert (left.changed, left.recycle) == (RUDE[how].changed, None)
        assert [state.read() for state in STATES] == before
        assert isolation.end("", SCENARIO).changed == ()


def test_every_state_is_changed_by_some_rude_class() -> None:
    all_states = {state.name for state in STATES} | {Streams.name}

    # A class that flushes subnormals adds them wrongly: it is not right, and below.
    assert {name for act in RUDE.values() for name in act.changed} == all_states - {"flush-denormal mode"}


def test_the_harness_computes_in_its_own_environment_and_the_class_in_the_one_it_made() -> None:
    with isolated() as isolation:
        isolation.begin("", SCENARIO)
        with isolation.around():
            torch.set_default_dtype(torch.float64)
            torch.set_flush_denormal(True)
        assert torch.zeros(()).dtype == torch.float32
        assert float(torch.tensor(1e-40, dtype=torch.float32) * 1.0) > 0.0
        with isolation.around():
            assert torch.zeros(()).dtype == torch.float64
            assert float(torch.tensor(1e-40, dtype=torch.float32) * 1.0) == 0.0
            torch.set_default_dtype(torch.float32)

        assert isolation.end("", SCENARIO).changed == ("flush-denormal mode",)


def test_what_an_import_changes_belongs_to_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with isolated() as isolation:
        monkeypatch.delenv("MINE", raising=False)
        with isolation.importing("one"):
            torch.set_default_dtype(torch.float64)
            os.environ["MINE"] = "1"
        for subject, dtype, mine in (("one", torch.float64, "1"), ("two", torch.float32, None)):
            assert (torch.get_default_dtype(), os.environ.get("MINE")) == (torch.float32, None)
            isolation.begin(subject, SCENARIO)
            with isolation.around():
                assert (torch.get_default_dtype(), os.environ.get("MINE")) == (dtype, mine)
            assert isolation.end(subject, SCENARIO).changed == ()


def test_a_class_that_undoes_what_its_import_did_has_changed_it() -> None:
    with isolated() as isolation:
        with isolation.importing("one"):
            torch.set_default_dtype(torch.float64)
            os.environ["MINE"] = "1"
        isolation.begin("one", SCENARIO)
        with isolation.around():
            torch.set_default_dtype(torch.float32)
            del os.environ["MINE"]

        assert isolation.end("one", SCENARIO).changed == ("default dtype", "environment")


def test_an_import_that_raises_is_undone_too() -> None:
    with isolated() as isolation:
        with suppress(ZeroDivisionError), isolation.importing("one"):
            torch.set_default_dtype(torch.float64)
            _ = 1 / 0

        assert torch.get_default_dtype() == torch.float32


def test_what_cannot_be_put_back_ends_the_use_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    isolation = Isolation(0, lambda lost: None)
    monkeypatch.chdir(tmp_path)
    gone.rmdir()

    assert isolation.end("", SCENARIO).recycle == "what the class changed could not be put back: working directory"


def test_signals_are_armed_again_where_handlers_changed() -> None:
    rearmed = Rearmed()
    isolation = Isolation(0, rearmed)
    isolation.end("", SCENARIO)
    torch.set_default_dtype(torch.float64)
    isolation.end("", SCENARIO)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    isolation.end("", SCENARIO)

    assert rearmed == [False, False, True]


def test_an_exception_of_the_harness_is_told_from_one_that_begins_in_other_code() -> None:
    with pytest.raises(UsageError) as caught:
        presets.parameters("no such preset")
    error = caught.value

    assert not interrupted(error.with_traceback(caught.tb.tb_next))
    assert interrupted(error.with_traceback(caught.tb))  # with a frame of this test's


# Random generators


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_generators_follow_from_the_scenario_and_the_rank() -> None:
    seen = {}
    for seed in (0, 1, 2**63 - 1):
        for rank in (0, 1):
            seed_generators(seed, rank)
            seen[seed, rank] = draws()
            seed_generators(seed, rank)
            assert draws() == seen[seed, rank]

    assert len({values[0] for values in seen.values()}) == 6
    assert len({values[1] for values in seen.values()}) == 6
    assert len({values[2] for values in seen.values()}) == 3  # equal on all ranks, as under a launcher


# Growth

SMALL = Limits(threads=3, descriptors=5, children=2, groups=2, tensors=50, resident_bytes=2**40)


def test_nothing_is_said_of_a_process_that_does_not_grow() -> None:
    counted = Growth(SMALL, every=1, tensors_every=3)

    assert [counted.after(SCENARIO) for _ in range(10)] == [None] * 10


def test_threads_beyond_the_limit_are_named() -> None:
    counted = Growth(SMALL, every=1)
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(6)]
    try:
        said = []
        for thread in threads:
            thread.start()
            said.append(counted.after(SCENARIO))
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert said == [None, None, None, None, None, "it has 4 more threads than after its second scenario"]


def test_descriptors_beyond_the_limit_are_named() -> None:
    counted = Growth(SMALL, every=1)
    said = [counted.after(SCENARIO), counted.after(SCENARIO)]
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    try:
        said.append(counted.after(SCENARIO))
    finally:
        for descriptor in opened:
            os.close(descriptor)

    assert said == [None, None, "it has 6 more open descriptors than after its second scenario"]


def test_tensors_are_counted_now_and_then() -> None:
    gc.collect()
    counted = Growth(SMALL, every=1, tensors_every=4)
    said, kept = [], []
    for _ in range(8):
        said.append(counted.after(SCENARIO))
        kept.append([torch.zeros(1) for _ in range(10)])

    assert said[:7] == [None] * 7
    assert said[7] == "it has 60 more live tensors than after its second scenario"


def test_tensors_in_garbage_do_not_count() -> None:
    counted = Growth(SMALL, every=1, tensors_every=4)
    said = []
    gc.disable()
    try:
        for _ in range(4):
            said.append(counted.after(SCENARIO))
            cycle: list[object] = [torch.zeros(1) for _ in range(30)]
            cycle.append(cycle)
    finally:
        gc.enable()

    assert said == [None] * 4


def test_memory_is_held_against_the_largest_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB are a leak after scenarios of some thousand elements, and the remains of one of GPT-2's size."""
    counts = dict.fromkeys(("threads", "descriptors", "children", "groups", "resident_bytes"), 0)
    monkeypatch.setattr(growth, "_counts", lambda: dict(counts))
    small, large = Growth(every=1), Growth(every=1)
    assert [small.after(SCENARIO) for _ in range(2)] == [None, None]
    assert [large.after(SCENARIO) for _ in range(2)] == [None, None]
    counts["resident_bytes"] = 2**31

    assert "its memory grew by 2,048 MiB" in (small.after(SCENARIO) or "")
    assert large.after(BIG) is None


def test_process_groups_and_children_beyond_the_limit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (("groups", "process groups"), ("children", "child processes")):
        counts = dict.fromkeys(("threads", "descriptors", "children", "groups", "resident_bytes"), 0)
        monkeypatch.setattr(growth, "_counts", lambda counts=counts: dict(counts))
        counted = Growth(SMALL, every=1)
        said = [counted.after(SCENARIO), counted.after(SCENARIO)]
        counts[name] = 2
        said.append(counted.after(SCENARIO))
        counts[name] = 3
        said.append(counted.after(SCENARIO))
        assert said == [None, None, None, f"it has 3 more {words} than after its second scenario"]


# Several ranks in one process: threads that take turns

WORLD = 2
PATIENCE_S = 120.0


@contextmanager
def isolated_world() -> Iterator[Isolation]:
    made = Isolation(None, lambda lost: None)
    try:
        yield made
    finally:
        made.end("", SCENARIO)


def in_threads(isolation: Isolation, act: Callable[[int, Environment], Iterator[None]]) -> None:
    """Ranks in turns: each goes as far as its next ``yield``, where the other has its turn."""
    turns = [threading.Semaphore(0) for _ in range(WORLD)]
    over = threading.Semaphore(0)
    running = set(range(WORLD))
    failures: list[Exception] = []

    def run(rank: int) -> None:
        environment = isolation.environment(rank)
        assert turns[rank].acquire(timeout=PATIENCE_S)
        try:
            with environment.on_thread():
                for _ in act(rank, environment):
                    environment.leave()
                    over.release()
                    assert turns[rank].acquire(timeout=PATIENCE_S)
                    environment.come_back()
        except Exception as error:  # noqa: BLE001 (raised below)
            failures.append(error)
        running.discard(rank)
        over.release()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    while running:
        for rank in sorted(running):
            turns[rank].release()
            assert over.acquire(timeout=PATIENCE_S)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _patched(*args: object, **kwargs: object) -> None:
    """Stands for a function of a class's."""


# What one rank's class does to the process, and how anybody sees it.
OF_PROCESS: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype, "default dtype"),
    "warnings": (lambda: warnings.simplefilter("always"), lambda: list(warnings.filters), "warnings filters"),
    "recursion limit": (lambda: sys.setrecursionlimit(1234), sys.getrecursionlimit, "recursion limit"),
    "all_reduce": (
        lambda: setattr(dist, "all_reduce", _patched),
        lambda: dist.all_reduce,
        "functions of torch.distributed",
    ),
    "get_rank": (
        lambda: setattr(dist.distributed_c10d, "get_rank", _patched),
        lambda: dist.distributed_c10d.get_rank,
        "functions of torch.distributed",
    ),
}


@pytest.mark.parametrize("name", OF_PROCESS)
def test_what_a_class_makes_of_the_process_is_not_there_in_others_turns(name: str) -> None:
    act, see, state = OF_PROCESS[name]
    seen: dict[tuple[int, str], object] = {}

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        seen[rank, "at first"] = see()
        with environment.around():
            if rank == 0:
                act()
            seen[rank, "before"] = see()
            yield
            seen[rank, "after"] = see()
        seen[rank, "outside"] = see()
        yield
        with environment.around():
            seen[rank, "later"] = see()

    with isolated_world() as isolation:
        home = see()
        isolation.begin("", SCENARIO)
        in_threads(isolation, rank_acts)
        left = isolation.end("", SCENARIO)

        assert {seen[0, when] == home for when in ("before", "after", "later")} == {False}
        assert seen[0, "outside"] == home
        assert {value == home for (rank, _), value in seen.items() if rank == 1} == {True}
        assert see() == home
        assert (left.changed, left.recycle) == ((state,), None)


# What is of a thread, likewise; the other rank's thread begins with what every thread does.
OF_THREAD = [
    "default device",
    "no grad",
    "inference mode",
    "autocast",
    "errstate",
    "threads",
    "trace",
    "profile",
    "block signals",
]


@pytest.mark.parametrize("how", OF_THREAD)
def test_what_a_class_makes_of_its_thread_is_named_and_is_nobody_elses(how: str) -> None:
    def others() -> list[object]:
        return [state.read() for state in STATES if state.thread]

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        if rank == 1:
            assert others() == fresh
        with environment.around():
            if rank == 0:
                RUDE[how].act()
            yield
        if rank == 1:
            assert others() == fresh
        yield

    with isolated_world() as isolation:
        fresh = in_a_thread(others)
        here = others()
        isolation.begin("", SCENARIO)
        in_threads(isolation, rank_acts)
        left = isolation.end("", SCENARIO)

        assert (left.changed, left.recycle) == (RUDE[how].changed, None)
        assert others() == here
        assert in_a_thread(others) == fresh


def in_a_thread(function: Callable[[], list[object]]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(function()))
    thread.start()
    thread.join()
    return found


def test_flushing_subnormals_is_of_one_rank_alone_and_only_of_its_class() -> None:
    seen: dict[tuple[int, str], bool] = {}

    def flushes() -> bool:
        return float(torch.tensor(1e-40, dtype=torch.float32) * 1.0) == 0.0

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        with environment.around():
            torch.set_flush_denormal(rank == 0)
            yield
            seen[rank, "inside"] = flushes()
        seen[rank, "outside"] = flushes()

    with isolated_world() as isolation:
        isolation.begin("", SCENARIO)
        in_threads(isolation, rank_acts)

        assert seen == {(0, "inside"): True, (0, "outside"): False, (1, "inside"): False, (1, "outside"): False}
        assert isolation.end("", SCENARIO).changed == ("flush-denormal mode",)


def test_changes_of_all_ranks_are_reported_once_each_and_in_the_order_of_the_table() -> None:
    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        with environment.around():
            torch.set_grad_enabled(rank == 0)
            torch.set_default_dtype(torch.float64)
            yield
            gc.disable()

    with isolated_world() as isolation:
        isolation.begin("", SCENARIO)
        in_threads(isolation, rank_acts)

        assert isolation.end("", SCENARIO).changed == ("default dtype", "grad mode", "garbage collector")
        assert (torch.get_default_dtype(), gc.isenabled()) == (torch.float32, True)


def test_a_rank_that_is_not_in_a_call_of_its_class_has_nothing_to_put_aside() -> None:
    with isolated_world() as isolation:
        isolation.begin("", SCENARIO)
        environment = isolation.environment(0)
        torch.set_default_dtype(torch.float64)
        environment.leave()

        assert torch.get_default_dtype() == torch.float64


def test_each_ranks_import_has_its_own_functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the modules of the class are imported for each rank, what they put into torch is of that rank."""
    monkeypatch.delenv("MINE", raising=False)
    functions = [lambda: 0, lambda: 1]
    seen = []

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        for _ in range(2):
            with environment.around():
                yield
                device = torch.empty(0).device.type
                seen.append((rank, dist.reduce is functions[rank], os.environ["MINE"], device, torch.is_grad_enabled()))

    with isolated_world() as isolation:
        original = dist.reduce
        for rank in range(WORLD):
            with isolation.importing("one", rank):
                dist.reduce = functions[rank]
                os.environ["MINE"] = f"of {rank}"  # the process has but one: the first counts
                torch.set_default_device("meta")
                torch.set_grad_enabled(False)
            assert (dist.reduce is original, "MINE" in os.environ, torch.is_grad_enabled()) == (True, False, True)
        isolation.begin("one", SCENARIO)
        assert (dist.reduce is original, os.environ["MINE"]) == (True, "of 0")
        in_threads(isolation, rank_acts)

        assert isolation.end("one", SCENARIO).changed == ()
        assert sorted(seen) == [(rank, True, "of 0", "meta", False) for rank in (0, 0, 1, 1)]
        assert (dist.reduce is original, "MINE" in os.environ) == (True, False)


def test_an_import_in_a_process_of_several_ranks_is_for_one_of_them() -> None:
    with isolated_world() as isolation, pytest.raises(ValueError, match="for which rank"), isolation.importing("one"):
        pass


def test_each_rank_is_asked_for_its_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[object] = ["of 0", "of 1"]
    turn: list[int] = []
    monkeypatch.setattr("harness.drive.isolation.default_group", lambda: groups[turn[-1]] if turn else None)
    gone = {}

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        if rank == 1:
            groups[1] = None
        yield
        gone[rank] = environment.group_is_gone

    with isolated_world() as isolation:
        isolation.begin("", SCENARIO)
        for rank in range(WORLD):
            turn.append(rank)
            with isolation.environment(rank).on_thread():
                for _ in rank_acts(rank, isolation.environment(rank)):
                    pass
        turn.clear()

        assert gone == {0: False, 1: True}
        assert isolation.end("", SCENARIO).recycle is None  # its groups were made for this scenario


def test_what_came_back_does_not_come_back_again() -> None:
    seen = []

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        with environment.around():
            torch.set_default_dtype(torch.float64)
            yield
            torch.set_default_dtype(torch.float32)
            yield
            seen.append(torch.get_default_dtype())

    with isolated_world() as isolation:
        isolation.begin("", SCENARIO)
        in_threads(isolation, rank_acts)

        assert seen == [torch.float32] * WORLD


def test_a_rank_whose_import_raised_has_the_environment_of_the_first() -> None:
    """Its class is the first one's, then."""
    seen = []

    def rank_acts(rank: int, environment: Environment) -> Iterator[None]:
        with environment.around():
            seen.append((torch.get_default_dtype(), np.geterr()["over"]))
        yield

    with isolated_world() as isolation:
        with isolation.importing("one", 0):
            torch.set_default_dtype(torch.float64)
        with suppress(ZeroDivisionError), isolation.importing("one", 1):
            np.seterr(over="raise")
            _ = 1 / 0
        isolation.begin("one", SCENARIO)
        in_threads(isolation, rank_acts)

        assert isolation.end("one", SCENARIO).changed == ()
        assert seen == [(torch.float64, "warn")] * WORLD
