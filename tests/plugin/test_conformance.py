"""``harness.conformance``: a user's file of a few lines becomes the battery; right ones pass, wrong ones are named."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import harness
from harness.checking import REGRESSIONS
from harness.errors import UsageError
from harness.plugin.battery import Conformance, checks
from harness.scenario.systems import GOALS
from tests.plugin.conftest import ROOT
from tests.support import FULL_TABLE

BROKEN = ROOT / "tests" / "subjects" / "broken.py"
CASE = REGRESSIONS / "local-norm.json"

FILE = f"""
import harness
from zero2core import ZeroMaster


class Right(ZeroMaster):
    pass


class Few(ZeroMaster):
    def __init__(self, params, rank, world, **rest):
        if len(params) > 2:
            raise NotImplementedError("two parameters at most")
        super().__init__(params, rank, world, **rest)


class Nothing(ZeroMaster):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("not yet")


class Lacking:
    pass


FEW = dict(worlds=(2,), examples=4, regressions=False)
test_right = harness.conformance(Right, **FEW | dict(real_examples=1))
test_few = harness.conformance(Few, **FEW | dict(real_examples=0, examples=12))
test_nothing = harness.conformance(Nothing, **FEW | dict(real_examples=0))
test_lacking = harness.conformance(Lacking, **FEW | dict(real_examples=0))
test_wrong = harness.conformance({str(BROKEN)!r} + ":LostFirstPart", **FEW | dict(real_examples=0))
"""

CHOSEN = "one-part or two-parts or not-divisible or campaign"
AIMED = ("one-part", "two-parts", "elements-not-divisible-by-world")
FEWER = "(test_right and (two-parts or gloo)) or (test_wrong and (not-divisible or two-parts))"
MODES = {"alone": ("-W", "error", "-k", CHOSEN), "xdist": ("-n", "2", "--import-mode=importlib", "-k", FEWER)}

PASSED = {
    *(f"test_right::{name}[world2]" for name in (*AIMED, "campaign")),
    "test_right::campaign[world2-gloo]",
    "test_few::one-part[world2]",
    "test_few::campaign[world2]",
    "test_few::elements-not-divisible-by-world[world2]",
    "test_wrong::elements-not-divisible-by-world[world2]",
}
SKIPPED = {"test_few::two-parts[world2]", *(f"test_nothing::{name}[world2]" for name in AIMED)}
FAILED = {
    "test_nothing::campaign[world2]",
    *(f"test_lacking::{name}[world2]" for name in (*AIMED, "campaign")),
    "test_wrong::one-part[world2]",  # in some step; in another there are several
    "test_wrong::two-parts[world2]",
    "test_wrong::campaign[world2]",
}
IN_FEWER = {
    "test_right::two-parts[world2]",
    "test_right::campaign[world2-gloo]",
    "test_wrong::elements-not-divisible-by-world[world2]",
    "test_wrong::two-parts[world2]",
}


def _ends(path: Path) -> dict[str, dict[str, str]]:
    """Status -> name of test -> what was said."""
    found: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failure, skipped = case.find("failure"), case.find("skipped")
        if failure is not None:
            found["failed"][name] = failure.text or ""
        elif skipped is not None:
            found["skipped"][name] = skipped.get("message") or ""
        else:
            found["passed"][name] = ""
    return found


@pytest.mark.parametrize("mode", MODES if FULL_TABLE else ["alone"])
def test_the_battery_tells_right_from_wrong(plugin: pytest.Pytester, mode: str) -> None:
    plugin.makepyfile(test_mine=FILE)

    result = plugin.runpytest_subprocess(*MODES[mode], "--junit-xml=junit.xml", "-o", "junit_family=xunit1")

    ends = _ends(plugin.path / "junit.xml")
    run = IN_FEWER if mode == "xdist" else PASSED | SKIPPED | FAILED
    assert set(ends["passed"]) == PASSED & run
    assert ends["skipped"] == dict.fromkeys(SKIPPED & run, "the class declines this scenario (NotImplementedError)")
    failed = ends["failed"]
    assert set(failed) == FAILED & run
    if mode == "alone":
        assert "unknown: " in failed["test_nothing::campaign[world2]"]
        assert "nothing was compared" in failed["test_nothing::campaign[world2]"]
        assert "no method collect" in failed["test_lacking::one-part[world2]"]
    wrong = failed["test_wrong::two-parts[world2]"].splitlines()
    assert wrong[0].startswith(f"spill violated: {BROKEN}:LostFirstPart on sim, world 2, ")
    labels = [line.split()[0] for line in wrong if line.startswith("  ")]
    assert {"property", "stage", "expected", "actual", "case", "replay"} <= set(labels)
    assert "harness/plugin" not in failed["test_wrong::two-parts[world2]"]  # no traceback of ours
    saved = [line.split()[1] for line in wrong if line.split()[:1] == ["case"]]
    assert (plugin.path / saved[0]).is_file()
    assert result.ret == 1

    cases = {case.get("name", ""): case for case in ET.parse(plugin.path / "junit.xml").iter("testcase")}
    named = {each.get("name"): each.get("value") for each in cases["campaign[world2-gloo]"].iter("property")}
    assert named == {
        "world": "2",
        "backend": "gloo",
        "scenario_id": "campaign[world2-gloo]",
        "seed": "0",
        "verdict": "holds",
    }


def _battery(**given: object) -> Conformance:
    return harness.conformance("zero2", **given)  # type: ignore[arg-type]


def test_every_situation_of_every_world_is_a_test_and_the_same_every_time() -> None:
    names = [check.name for check in checks(_battery(worlds=(1, 3)), ROOT)]
    assert names == [check.name for check in checks(_battery(worlds=(1, 3)), ROOT)]
    assert len(set(names)) == len(names)
    assert {f"{goal.value}[world3]" for goal in GOALS["zero_master"]} <= set(names)
    assert "order-matters[world1]" not in names  # nothing is summed there
    assert {"campaign[world1]", "campaign[world3]", "campaign[world1-gloo]", "campaign[world3-gloo]"} <= set(names)
    assert "regression-bf16-sum-at-world-three" in names
    assert "regression-local-norm" not in names  # of world 2
    only = [check.name for check in checks(_battery(worlds=(3,), regressions=False, real_examples=0), ROOT)]
    one = checks(_battery(worlds=3, regressions=False, real_examples=0), ROOT)
    assert [check.name for check in one] == only
    assert not [name for name in only if "gloo" in name or name.startswith("regression")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"worlds": ()}, "at least one"),
        ({"worlds": (2, 2)}, "each once"),
        ({"worlds": (0,)}, "whole numbers from 1"),
        ({"worlds": 2.5}, "worlds=2.5: expected whole numbers from 1 to 256, in a tuple"),
        ({"worlds": "3"}, "worlds='3'"),
        ({"examples": 0}, "examples=0: expected a whole number of at least 1"),
        ({"examples": 2.5}, "examples=2.5"),
        ({"real_examples": None}, "real_examples=None: expected a whole number of at least 0"),
        ({"seed": "first"}, "seed='first': expected a whole number"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"timeout_s": 0}, "timeout_s=0: expected a number of seconds above zero"),
        ({"timeout_s": "long"}, "timeout_s='long'"),
        ({"subject_args": [1]}, "subject_args=[1]: expected a mapping"),
        ({"subject_args": {"scale": [1]}}, "subject_args scale=[1]: expected text, a number"),
        ({"config": 5}, "config=5: expected a mapping"),
        ({"cases": 7}, "cases=7: expected the path of a directory"),
        ({"backend": "mpi"}, "expected one of sim, gloo, nccl"),
        ({"system": "muon"}, "system='muon': zero2 is of system 'zero_master'"),
        ({"system": "adam"}, "expected one of zero_master, muon, strategy"),
        ({"subject_args": {"rank": 1}}, "not a further keyword argument"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        _battery(**given)
    assert said in str(raised.value)


def test_a_class_that_ranks_cannot_import_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(UsageError, match="top level of a file"):
        harness.conformance(Local)
    with pytest.raises(UsageError, match="expected a class"):
        harness.conformance(7)  # type: ignore[arg-type]


def test_saved_cases_are_tests_and_a_missing_directory_is_told(plugin: pytest.Pytester) -> None:
    (plugin.mkdir("kept") / "mine.json").write_bytes(CASE.read_bytes())
    plugin.makepyfile(
        test_kept="import harness\ntest_it = harness.conformance('zero2', worlds=(3,), cases='kept')\n",
        test_none="import harness\ntest_it = harness.conformance('zero2', cases='elsewhere')\n",
    )
    result = plugin.runpytest_inprocess("--collect-only", "-q", "-p", "no:xdist")
    result.stdout.fnmatch_lines(["test_kept.py::test_it::case-mine", "*cases='elsewhere': no such directory*"])


def test_a_scenario_of_the_command_line_runs_alone(plugin: pytest.Pytester) -> None:
    plugin.makepyfile(
        test_wrong=f"import harness\ntest_it = harness.conformance({str(BROKEN)!r} + ':LocalNorm', worlds=(2, 3))\n",
        test_other="def test_other():\n    pass\n",
    )
    result = plugin.runpytest_subprocess("--ranks-scenario", str(CASE))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*norm violated: *LocalNorm on sim*"])

    # The process that waits imports no torch, so that it may be this one.
    result = plugin.runpytest_inprocess("--ranks-scenario", str(CASE), "test_other.py", "-v", "-p", "no:xdist")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*scenario-local-norm*PASSED*"])

    result = plugin.runpytest_inprocess("--ranks-scenario", "nowhere.json", "test_other.py", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --ranks-scenario: *nowhere.json*"])
