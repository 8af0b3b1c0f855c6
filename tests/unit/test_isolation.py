"""States of a process are put back and what piles up is counted, in this very process."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import harness.drive.handler  # noqa: F401 (imports what a rank has imported, which changes filters and environment)
from harness.drive import growth
from harness.drive.growth import Growth, Limits
from harness.drive.isolation import Isolation, interrupted
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
