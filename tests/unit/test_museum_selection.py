"""Which exhibits a command line means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.errors import UsageError
from harness.faults.museum import catalogue
from harness.faults.museum.exhibit import Control
from harness.museum.selection import Selection, find, select

(MAX,) = (plant for plant in catalogue.PLANTS if plant.name == "MaxOfNorms")
DIES = replace(MAX, name="DiesInGather", bugs=("a/b#7", MAX.bugs[0]), processes=True)
RACES = replace(MAX, name="ReadsBeforeWait", bugs=("a/c#9",), timing=True)
PLAIN = Control("PlainZero", "what all others are variants of")


@pytest.fixture(autouse=True)
def _three_plants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "PLANTS", (MAX, DIES, RACES))
    monkeypatch.setattr(catalogue, "CONTROLS", (PLAIN,))
    monkeypatch.setattr(catalogue, "LEFT_OUT", {"a/b#8": "needs a stream of a GPU"})


def chosen(*names: str, backend: str = "sim", everything: bool = False, controls: bool = True) -> Selection:
    return select(names, backend=backend, everything=everything, controls=controls)


def test_all_are_run_unless_something_else_is_asked_for() -> None:
    assert chosen() == Selection((MAX, DIES, RACES), (PLAIN,))
    assert chosen(controls=False) == Selection((MAX, DIES, RACES))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_real_ranks_only_what_needs_them_is_run_and_races_only_if_named(backend: str) -> None:
    assert chosen(backend=backend) == Selection((DIES,), (PLAIN,))
    assert chosen(backend=backend, everything=True) == Selection((MAX, DIES), (PLAIN,), simulated_only=(RACES,))
    assert chosen("max-of-norms", "reads-before-wait", backend=backend) == Selection((MAX, RACES))


def test_all_means_nothing_on_sim() -> None:
    with pytest.raises(UsageError, match="--all: on sim every plant is run anyway"):
        chosen(everything=True)


def test_a_plant_goes_by_its_id_its_class_and_its_bugs() -> None:
    assert chosen("dies-in-gather") == chosen("DiesInGather") == chosen("a/b#7") == Selection((DIES,))
    assert chosen(MAX.bugs[0]) == Selection((MAX, DIES))
    assert chosen("DiesInGather", "max-of-norms", "dies-in-gather") == Selection((MAX, DIES))


@pytest.mark.parametrize(
    "name",
    [
        "museum:dies-in-gather",
        "dies_in_gather",
        "Dies-In-Gather",
        "diesingather",
        "A/B#7",
        "b#7",
        "https://github.com/a/b/issues/7",
        "https://github.com/a/b/pull/7#issuecomment-12",
        "github.com/A/b/issues/7/",
    ],
)
def test_it_is_found_however_its_name_is_written(name: str) -> None:
    assert chosen(name) == Selection((DIES,))
    assert find("--show", name) == (DIES,)


def test_controls_can_be_looked_up_too() -> None:
    assert (
        find("--show", "Plain_Zero") == find("--show", "museum:plain-zero") == find("--show", "PlainZero") == (PLAIN,)
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("max-of-norm", "did you mean max-of-norms?"),
        ("MaxOfNorm", "did you mean MaxOfNorms?"),
        ("facebookresearch/fairscale#16", "did you mean facebookresearch/fairscale#167?"),
        ("max_of_norm", "did you mean max-of-norms?"),
        ("zzz", "`museum --list` shows them"),
        ("a/b#8", "no plant was made of this bug: needs a stream of a GPU"),
        ("https://github.com/a/b/issues/8", "no plant was made of this bug: needs a stream of a GPU"),
        ("plain-zero", "that is a control; `verify --subject museum:plain-zero` runs it"),
    ],
)
def test_an_unknown_name_is_refused_with_what_may_be_meant(name: str, answer: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen("max-of-norms", name)
    assert str(refused.value).startswith(f"--plant {name}: ")
    assert answer in str(refused.value)


def test_one_kind_of_system_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = Control("OtherOrder", "adds squares backwards", system="muon")
    monkeypatch.setattr(catalogue, "CONTROLS", (PLAIN, matrices))
    muon = select([], backend="sim", everything=False, controls=True, system="muon")
    assert muon == Selection((), (matrices,))
    assert select([], backend="sim", everything=False, controls=True, system="zero_master") == Selection(
        (MAX, DIES, RACES), (PLAIN,)
    )
    with pytest.raises(UsageError, match="one or the other"):
        select([MAX.id], backend="sim", everything=False, controls=True, system="muon")
