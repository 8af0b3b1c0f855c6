"""Bodies of tests on every rank: each way in which they can end, without pytest-xdist and with it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import psutil
import pytest

from tests.support import FULL_TABLE

FILE = """
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from helper import doubled


def numbers():
    return [2, dist.get_rank(), 3]


class Point:
    def __init__(self, x):
        self.x = x


@pytest.fixture
def point():
    return Point(4)


@pytest.fixture
def request_id(request):
    return request.node.name


@pytest.fixture
def where(tmp_path):
    (tmp_path / "given").write_text("by the fixture")
    return tmp_path


@pytest.mark.ranks(world=(2, 3))
@pytest.mark.parametrize("n", [1, 5])
def test_passes(ranks, n, point, where, request_id):
    assert f"world{ranks.world}-" in request_id
    assert isinstance(point, Point)
    assert (where / "given").read_text() == "by the fixture"
    assert (ranks.rank, ranks.world) == (dist.get_rank(), dist.get_world_size())
    assert (ranks.backend, ranks.device) == ("gloo", "cpu")
    total = torch.full((2,), float(n + point.x))
    dist.all_reduce(total)
    assert total.tolist() == [(n + 4) * ranks.world] * 2


@pytest.mark.ranks
class TestClass:
    def setup_method(self):
        self.value = 7

    def test_attributes(self, ranks):
        assert self.value == 7 and dist.get_world_size() == 2

    def test_attributes_fail(self):
        assert self.value == 8


@pytest.mark.ranks(world=3)
def test_one_rank(ranks):
    print("said by", ranks.rank)
    if ranks.rank == 1:
        assert numbers() == [2, 0, 3]


@pytest.mark.ranks
def test_every_rank():
    left = {"a": 1}
    assert left == {"a": 2}


@pytest.mark.ranks
def test_kept(ranks):
    assert ranks.rank == 0  # and not on the other: a clean failure


@pytest.mark.ranks
def test_waited_for(ranks):
    if ranks.rank == 1:
        raise ValueError("before the barrier")
    dist.barrier()


@pytest.mark.ranks(timeout=2)
def test_hangs(ranks):
    if ranks.rank == 1:
        dist.barrier()


@pytest.mark.ranks
def test_exits(ranks):
    if ranks.rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.ranks
def test_killed(ranks):
    if ranks.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks
def test_unequal(ranks):
    if ranks.rank:
        dist.all_reduce(torch.ones(1), async_op=True)


@pytest.mark.ranks
def test_destroys():
    dist.destroy_process_group()


@pytest.mark.ranks
def test_after_all_that():
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 2


@pytest.mark.ranks
def test_skips():
    pytest.skip("no need")


@pytest.mark.ranks
def test_some_skip(ranks):
    if ranks.rank:
        pytest.skip("not here")


@pytest.mark.ranks(world=200, backend="nccl")
def test_many_gpus():
    pass


@pytest.mark.ranks
def test_expected():
    pytest.xfail("known")


@pytest.mark.ranks
@pytest.mark.xfail(strict=True)
def test_marked():
    assert numbers() == []


class Known(Exception):
    def __init__(self, first, second):
        super().__init__(first)


@pytest.mark.ranks
@pytest.mark.xfail(raises=(KeyError, Known), strict=True)
def test_of_its_kind(ranks):
    if ranks.rank:
        raise Known(1, 2)
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.xfail(raises=Known)
def test_of_another_kind(ranks):
    raise Known(1, 2) if ranks.rank else KeyError("another")


@pytest.mark.ranks
@pytest.mark.xfail(raises=Known)
def test_of_no_kind(ranks):
    if ranks.rank:
        os._exit(3)
    raise Known(1, 2)


@pytest.mark.ranks
@pytest.mark.filterwarnings("error::UserWarning")
def test_warned():
    warnings.warn("by the marker", UserWarning)


@pytest.mark.ranks
def test_warned_otherwise():
    warnings.warn("by the option", FutureWarning)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_not_warned():
    warnings.warn("by none", FutureWarning)


@pytest.mark.ranks
def test_told():
    pytest.fail("in these words", pytrace=False)


@pytest.mark.ranks
def test_not_plain(ranks, monkeypatch):
    pass


def shifted(by, more):
    return by + more + dist.get_rank()


def fails():
    assert dist.get_rank() == 0


def test_call(ranks):
    assert ranks(shifted, 5, 1, world=3) == [6, 7, 8]
    assert ranks(doubled) == [0, 2]
    with pytest.raises(AssertionError, match="rank 1 of 2: assert 1 == 0"):
        ranks(fails)
    with pytest.raises(TypeError, match="a function of a module"):
        ranks(lambda: 1)
    with pytest.raises(ValueError, match="world=0"):
        ranks(shifted, world=0)
    with pytest.raises(ValueError, match="a call runs on one world"):
        ranks(doubled, world=(2, 3))


def test_call_fails(ranks):
    ranks(fails)


def test_without_the_marker(ranks):
    dist.barrier()


def pid():
    return os.getpid()


def out_of_step():
    if dist.get_rank():
        dist.all_reduce(torch.ones(1), async_op=True)


def test_processes_stay_and_are_replaced_when_they_cannot(ranks):
    first = ranks(pid)
    with pytest.raises(AssertionError, match="rank 1 of 2"):
        ranks(fails)
    assert ranks(pid) == first
    with pytest.raises(AssertionError, match="unequal collectives"):
        ranks(out_of_step)
    assert not set(ranks(pid)) & set(first)
"""

HELPER = """
import torch.distributed as dist

def doubled():
    return 2 * dist.get_rank()
"""

PASSED = {
    *(f"test_passes[world{world}-{n}]" for n in (1, 5) for world in (2, 3)),
    "test_attributes",
    "test_not_warned",
    "test_destroys",
    "test_after_all_that",
    "test_call",
    "test_processes_stay_and_are_replaced_when_they_cannot",
}
SKIPPED = {"test_skips", "test_many_gpus", "test_expected", "test_marked", "test_of_its_kind"}


# In the other import mode nothing of a test's directory is importable that is not said to be.
MODES = {"alone": ("-W", "error"), "xdist": ("-n", "2", "--import-mode=importlib", "-o", "pythonpath=.")}


@pytest.mark.parametrize("mode", MODES if FULL_TABLE else ["xdist"])
def test_every_end_is_told(plugin: pytest.Pytester, mode: str) -> None:
    plugin.makepyfile(test_ends=FILE, helper=HELPER)
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    result = plugin.runpytest_subprocess(
        *MODES[mode],
        "-rs",
        "-W",
        "error::FutureWarning",
        "--strict-markers",
        "--junit-xml=junit.xml",
        "-o",
        "junit_family=xunit1",
    )

    cases = {case.get("name", ""): case for case in ET.parse(plugin.path / "junit.xml").iter("testcase")}
    texts = {
        name: child.text or "" for name, case in cases.items() for child in case if child.tag in ("failure", "error")
    }
    skipped = {name: case.find("skipped") for name, case in cases.items()}
    reasons = {name: each.get("message", "") for name, each in skipped.items() if each is not None}
    assert set(reasons) == SKIPPED
    assert reasons["test_skips"] == "no need"
    assert "NCCL" in reasons["test_many_gpus"] or "200 GPUs" in reasons["test_many_gpus"]
    assert set(cases) - set(texts) - SKIPPED == PASSED
    assert result.ret == 1

    one = texts["test_one_rank"]
    assert "rank 1 of 3: assert [2, 1, 3] == [2, 0, 3]" in one
    assert "At index 1 diff: 1 != 0" in one
    assert "    def test_one_rank(ranks):" in one
    assert "rank 0: passed\nrank 2: passed" in one
    every = texts["test_every_rank"]
    assert "assert {'a': 1} == {'a': 2}" in every
    assert every.count("Differing items") == 1
    assert ": the same" in every
    assert "assert 7 == 8" in texts["test_attributes_fail"]
    assert "rank 1 of 2: assert 1 == 0" in texts["test_kept"]
    waited = texts["test_waited_for"]
    assert "rank 1 of 2: ValueError: before the barrier" in waited
    assert "rank 0: was still running when another rank had failed" in waited
    assert "in test_waited_for" in waited
    hangs = texts["test_hangs"]
    assert "rank 1 of 2: had not ended after 2 s" in hangs
    assert "in test_hangs" in hangs
    assert "rank.py" not in hangs  # of the stack the part that is the test's
    assert "rank 1 of 2: its process ended in the middle of the test: exit code 3" in texts["test_exits"]
    assert "rank 0 of 2: its process ended in the middle of the test: signal 9" in texts["test_killed"]
    assert "number 0 is none on rank 0 and all_reduce on rank 1 (0 and 1 in all)" in texts["test_unequal"]
    assert "rank 0 passed\nrank 1 skipped: not here" in texts["test_some_skip"]
    assert "KeyError: 'another'" in texts["test_of_another_kind"]
    assert "exit code 3" in texts["test_of_no_kind"]
    assert "UserWarning: by the marker" in texts["test_warned"]
    assert "FutureWarning: by the option" in texts["test_warned_otherwise"]
    assert "in these words" in texts["test_told"]
    assert "'monkeypatch' (MonkeyPatch) cannot be sent to the ranks" in texts["test_not_plain"]
    assert "rank 1 of 2: assert 1 == 0" in texts["test_call_fails"]
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_ends.py:*: no need"])  # where the test is
    result.stdout.fnmatch_lines(["*in no process group: mark the test with @pytest.mark.ranks(world=2)*"])
    # What ranks print is shown by rank, with what failed.
    result.stdout.fnmatch_lines(["*Captured rank 1 call*", "said by 1"])

    properties = {each.get("name"): each.get("value") for each in cases["test_passes[world3-1]"].iter("property")}
    assert properties == {"world": "3", "backend": "gloo"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
