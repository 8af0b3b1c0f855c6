"""Which round of a fuzz campaign comes next: the same rounds, whoever runs them and however fast."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest

from harness.fuzz.schedule import Next, Schedule


class Record(NamedTuple):
    limit: int
    num_examples: int


def run_all(schedule: Schedule, done: dict[int, Record], num_workers: int, random: Random, yields: int) -> None:
    """Let workers run whatever is handed out and finish in any order; one now and then loses its round."""
    running: list[Next] = []
    while not schedule.finished:
        while len(running) < num_workers and (due := schedule.next()) is not None:
            running.append(due)
        each = running.pop(random.randrange(len(running)))
        if random.random() < 0.8:
            done[each.index] = Record(each.limit, min(each.limit, yields))
        schedule.ended(each.index)


@pytest.mark.parametrize("yields", [10, 7, 1])  # rounds may give fewer scenarios than they are long
@pytest.mark.parametrize("examples", [1, 9, 10, 11, 64])
def test_the_rounds_of_so_many_examples_do_not_depend_on_who_is_fast(examples: int, yields: int) -> None:
    outcomes = []
    for seed in range(12):
        random = Random(seed)
        done: dict[int, Record] = {}
        run_all(Schedule(done, lambda _index: 10, examples), done, 1 + seed % 4, random, yields)
        outcomes.append(dict(sorted(done.items())))

    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert sum(record.num_examples for record in outcomes[0].values()) == examples
    assert list(outcomes[0]) == list(range(len(outcomes[0])))


def test_without_a_number_of_examples_there_is_always_a_next_round() -> None:
    schedule = Schedule({}, lambda _index: 10, None)
    assert [schedule.next() for _ in range(3)] == [Next(0, 10), Next(1, 10), Next(2, 10)]
    assert not schedule.finished


def test_a_round_that_was_lost_is_the_next_one() -> None:
    schedule = Schedule({}, lambda _index: 10, None)
    for _ in range(3):
        schedule.next()
    schedule.ended(1)
    assert schedule.next() == Next(1, 10)


def test_a_campaign_goes_on_at_the_first_round_that_is_not_done() -> None:
    done = {0: Record(10, 10), 1: Record(10, 9), 3: Record(10, 10)}
    schedule = Schedule(done, lambda _index: 10, None)
    assert [schedule.next(), schedule.next()] == [Next(2, 10), Next(4, 10)]


def test_a_round_that_was_cut_short_is_run_again_where_more_of_it_is_wanted() -> None:
    done = {0: Record(10, 10), 1: Record(4, 4)}
    assert Schedule(done, lambda _index: 10, 14).finished
    assert Schedule(done, lambda _index: 10, 12).finished
    schedule = Schedule(done, lambda _index: 10, 15)
    assert schedule.next() == Next(1, 5)


def test_rounds_in_which_something_was_seen_come_first() -> None:
    schedule = Schedule({0: Record(10, 10)}, lambda _index: 10, None, first=(5, 0))
    assert [schedule.next(), schedule.next()] == [Next(5, 10), Next(1, 10)]
    schedule.ended(5, urgent=True)
    assert schedule.next() == Next(5, 10)
