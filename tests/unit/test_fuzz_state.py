"""What a fuzz campaign keeps: whole or not at all, for the same campaign only, and what was found whatever happens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import UsageError
from harness.fuzz import state
from harness.fuzz.messages import Key, Slow
from harness.fuzz.state import Finding, Identity, RoundRecord
from harness.report.result import Failure
from harness.subjects.source import parse
from harness.tally import Counts

IDENTITY = Identity(
    subject="zero2",
    worlds=(1, 2),
    backend="sim",
    order="ring",
    schedule="random",
    seed=7,
    code="c0de",
    versions={"torch": "2"},
)


def record(index: int, count: int = 3) -> RoundRecord:
    counts = Counts(run={2: count}, seconds={2: 0.5}, checks={"weights": 4}, recycled=["rank 0: grew"], margin=0.25)
    slowest = Slow("ab", "world 2", 0.1)
    return RoundRecord(index=index, kind="aimed", limit=3, num_examples=count, counts=counts, slowest=slowest)


def plain(rounds: dict[int, RoundRecord]) -> dict[int, RoundRecord]:
    """Without what was added as they were kept."""
    return {index: msgspec.structs.replace(each, ids="") for index, each in rounds.items()}


def finding(name: str, *, complete: bool = True, index: int | None = 2, case: str | None = None) -> Finding:
    failure = Failure(property="weights", stage="gather", actual="nan", expected=1.0, case=case)
    return Finding(name=name, round=index, seen=Key("weights", "gather", None), complete=complete, failure=failure)


def test_what_is_kept_is_there_again(tmp_path: Path) -> None:
    with state.opened(tmp_path / "c", IDENTITY, seed=7, fresh=False) as kept:
        kept.keep(record(1), ["a", "b", "c"])
        kept.keep(record(0, 1), ["d"])
        digest = kept.ids_digest
        state.save_finding(kept.directory, finding("found"))
    with state.opened(tmp_path / "c", IDENTITY, seed=None, fresh=False) as kept:
        assert plain(kept.rounds) == {0: record(0, 1), 1: record(1)}
        assert kept.ids(1) == ["a", "b", "c"]
        assert kept.ids_digest == digest
        assert kept.findings() == [finding("found")]


def test_the_digest_tells_other_ids_another_order_and_other_rounds_apart(tmp_path: Path) -> None:
    digests = set()
    for number, rounds in enumerate([{0: "abc"}, {0: "acb"}, {0: "ab", 1: "c"}, {1: "abc"}, {0: "abd"}]):
        with state.opened(tmp_path / str(number), IDENTITY, seed=7, fresh=False) as kept:
            for index, ids in rounds.items():
                kept.keep(record(index, len(ids)), list(ids))
            digests.add(kept.ids_digest)
    assert len(digests) == 5


def test_a_round_whose_file_is_damaged_is_not_done(tmp_path: Path) -> None:
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False) as kept:
        for index in range(6):
            kept.keep(record(index), ["a", "b", "c"])
    (tmp_path / "rounds" / "000000.json").write_bytes(b'{"index": 0')
    (tmp_path / "ids" / "000001.txt").write_text("a\nb\n")
    (tmp_path / "ids" / "000003.txt").write_bytes(b"\xff\n\xfe\n\xff\n")
    (tmp_path / "ids" / "000004.txt").write_text("a\nb\nd\n")
    (tmp_path / "rounds" / "000005.json").rename(tmp_path / "rounds" / "000006.json")
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False) as kept:
        assert set(kept.rounds) == {2}


def test_what_a_killed_process_was_writing_is_removed_and_a_damaged_finding_is_named(tmp_path: Path) -> None:
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False) as kept:
        state.save_finding(kept.directory, finding("whole"))
        state.save_finding(kept.directory, finding("damaged"))
    damaged = tmp_path / "findings" / "damaged.json"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    half = tmp_path / "rounds" / ".zero2-0123.tmp"
    half.write_text("{")
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False) as kept:
        assert kept.damaged == [damaged]
        assert kept.findings() == [finding("whole")]
        assert not half.exists()


def test_a_directory_may_be_moved(tmp_path: Path) -> None:
    with state.opened(tmp_path / "a", IDENTITY, seed=7, fresh=False) as kept:
        case = kept.cases / "case-1.json"
        case.write_text("{}")
        found = finding("found", case=str(case))
        failure = msgspec.structs.replace(found.failure, replay=f"replay {case} --backend sim", test=f"CASE = '{case}'")
        state.save_finding(kept.directory, msgspec.structs.replace(found, failure=failure))
    (tmp_path / "a").rename(tmp_path / "b")
    with state.opened(tmp_path / "b", IDENTITY, seed=7, fresh=False) as kept:
        (moved,) = kept.findings()
    now = str(tmp_path / "b" / "cases" / "case-1.json")
    assert moved.failure.case == now
    assert moved.failure.replay == f"replay {now} --backend sim"
    assert moved.failure.test == f"CASE = '{now}'"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 8}, "seed was 7, is 8"),
        ({"worlds": (2,)}, "worlds was (1, 2), is (2,)"),
        ({"backend": "gloo"}, "backend was sim, is gloo"),
        ({"code": "0ther"}, "the code of the subject, or of the harness, has changed"),
        ({"versions": {"torch": "3"}}, "versions have changed"),
        ({"args": {"factor": 2}}, "args was {}, is {'factor': 2}"),
    ],
)
def test_another_campaign_does_not_go_on_in_its_place(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False):
        pass
    other = msgspec.structs.replace(IDENTITY, **changes)
    with (
        pytest.raises(UsageError, match="--fresh") as refused,
        state.opened(tmp_path, other, seed=other.seed, fresh=False),
    ):
        pass
    assert says in str(refused.value)


def test_without_a_seed_the_campaign_keeps_its_own(tmp_path: Path) -> None:
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False):
        pass
    other = msgspec.structs.replace(IDENTITY, seed=1234)
    with state.opened(tmp_path, other, seed=None, fresh=False) as kept:
        assert kept.identity == IDENTITY


def test_to_begin_again_forgets_the_rounds_and_keeps_what_was_found(tmp_path: Path) -> None:
    with state.opened(tmp_path, IDENTITY, seed=7, fresh=False) as kept:
        kept.keep(record(0), ["a", "b", "c"])
        state.save_finding(kept.directory, finding("round-000002-0", complete=False))
    other = msgspec.structs.replace(IDENTITY, seed=8, worlds=(3,))
    with state.opened(tmp_path, other, seed=8, fresh=True) as kept:
        assert (kept.rounds, kept.identity) == ({}, other)
        (left,) = kept.findings()
    # It is not taken for one of the new round 2, which would overwrite it.
    assert (left.name.startswith("kept-"), left.round, left.complete, left.foreign) == (True, None, True, True)
    assert left.failure == finding("x").failure


def test_two_processes_do_not_share_a_campaign(tmp_path: Path) -> None:
    with (
        state.opened(tmp_path, IDENTITY, seed=7, fresh=False),
        pytest.raises(UsageError, match="another fuzz campaign is running there"),
        state.opened(tmp_path, IDENTITY, seed=7, fresh=False),
    ):
        pass


def test_a_directory_that_cannot_be_one_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="cannot be used"),
        state.opened(tmp_path / "file", IDENTITY, seed=7, fresh=False),
    ):
        pass
    (tmp_path / "campaign.json").write_text("{}")
    with pytest.raises(UsageError, match="--fresh"), state.opened(tmp_path, IDENTITY, seed=7, fresh=False):
        pass


def test_merging_takes_rounds_of_the_same_campaign_and_findings_of_any(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for directory, identity in ((same, IDENTITY), (other, msgspec.structs.replace(IDENTITY, seed=9))):
        with state.opened(directory, identity, seed=identity.seed, fresh=False) as kept:
            kept.keep(record(4), ["a", "b", "c"])
            case = kept.cases / f"case-{directory.name}.json"
            case.write_text(directory.name)
            # The path is of the machine that it came from.
            state.save_finding(directory, finding("found", case=f"/elsewhere/cases/{case.name}"))
    with state.opened(tmp_path / "into", IDENTITY, seed=7, fresh=False) as kept:
        assert state.merge(kept, [same, other]) == (1, 2)
        assert state.merge(kept, [same, other]) == (0, 0)
        assert plain(kept.rounds) == {4: record(4)}
        found = kept.findings()
        assert sorted(Path(each.failure.case or "").read_text() for each in found) == ["other", "same"]
        assert all(each.complete and each.foreign and each.round is None for each in found)
        assert state.merge(kept, [tmp_path / "into"]) == (0, 0)
        with pytest.raises(UsageError, match="no campaign in it"):
            state.merge(kept, [tmp_path])


def test_the_default_directory_is_that_of_the_same_command_line_whatever_the_seed() -> None:
    place = state.default_directory(IDENTITY)
    assert place.parent == Path(".zero2-fuzz")
    assert place.name.startswith("zero2-")
    assert state.default_directory(msgspec.structs.replace(IDENTITY, seed=8, code="x")) == place
    assert state.default_directory(msgspec.structs.replace(IDENTITY, worlds=(2,))) != place
    odd = state.default_directory(msgspec.structs.replace(IDENTITY, subject="/a b/zero.py:Zero"))
    assert odd.name.startswith("zero-py-Zero-")


def test_the_code_of_a_subject_is_that_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n")
    before = state.code_of(parse(f"{file}:Mine"))
    assert state.code_of(parse(f"{file}:Mine")) == before
    file.write_text("class Mine: pass\n")
    assert state.code_of(parse(f"{file}:Mine")) != before
