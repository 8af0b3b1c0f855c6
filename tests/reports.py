"""Results that several tests render: a violation with all its pictures, a pass, a museum; and hostile text."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.museum.judging import Judgement, Naming
from harness.museum.score import CaseSize, ControlOutcome, MuseumResult, PlantOutcome, summarise, verdict_of
from harness.report.evidence import (
    Column,
    Evidence,
    Map,
    MapBucket,
    MapParameter,
    RankUlps,
    Row,
    Timeline,
    WrongRun,
    WrongValue,
)
from harness.report.reading import Told
from harness.report.result import Examples, Failure, FoundAfter, Result, WorldExamples
from harness.verdict import Property, RankAccount

HOSTILE = (
    "</script><script>alert('1')</script><img src=x onerror=alert(1)> \"'`|*_[x](http://e.x) &amp; ]]> "
    "\u202e\x00\x1b[31m"
)

EVIDENCE = Evidence(
    world=2,
    map=Map(
        quantity="gradient",
        numel=7,
        compared=7,
        wrong=3,
        wrong_padding=1,
        whole=False,
        parameters=(MapParameter("layers.0.weight", 0, 3), MapParameter("b", 3, 4)),
        buckets=(MapBucket(0, 0, 4, 4), MapBucket(1, 4, 7, 4)),
        runs=(WrongRun(0, 0, 0, 2), WrongRun(0, 1, 0, 1), WrongRun(1, 1, 3, 1)),
        values=(WrongValue(rank=0, parameter="b", element=1, expected="1.0", actual="nan", ulps=None),),
        ulps=(RankUlps(rank=0, bins={0: 1, 7: 2}), RankUlps(rank=1, bins={}, not_finite=1)),
        unit="fp32",
    ),
    timeline=Timeline(
        columns=(Column(None, "build"), Column(0, "collect"), Column(0, "reduce"), Column(0, "norm")),
        rows=(
            Row(0, ("agreed", "agreed", "differs", "after")),
            Row(1, ("agreed", "agreed", "agreed", "hung")),
        ),
    ),
)

FAILURE = Failure(
    property="gradient",
    step=0,
    stage="reduce",
    rank=0,
    parameter="layers.0.weight",
    element=1,
    bucket=0,
    owner=0,
    expected=1.5,
    actual=-1.5,
    expected_bits="0x3fc00000",
    actual_bits="0xbfc00000",
    ulps=12,
    mismatches=2,
    symptom="a part is missing (part 1)",
    message="the reduced gradient differs",
    scenario="world 2, 2 parameters of 7",
    output="printed by a rank",
    case="cases/c.json",
    test="from harness import check_case\n",
    replay="python -m harness replay cases/c.json --subject zero2",
    ranks=(RankAccount(rank=0, cause=True, end="sent its verdict", step=0, stage="reduce", num_collectives=1),),
    evidence=EVIDENCE,
)

HOLDS = Result(
    verdict="holds",
    subject="zero2",
    backend="gloo",
    worlds=(1, 3),
    seed=77,
    examples=Examples(run=300, discarded=2, per_world={1: WorldExamples(150, 90.0), 3: WorldExamples(150, 12.3)}),
    seconds=65.4,
    examples_per_second=4.6,
    oracle={"exact": 1200, "ordered": 80},
    properties={item.value: 40 for item in Property},
    reached={"world-three": 10, "one-bucket": 1, "later-spill": 0},
    versions={"torch": "2.13.0"},
)
VIOLATED = msgspec.structs.replace(HOLDS, verdict="violated", failure=FAILURE, subject="./mine.py:Zero2")
UNKNOWN = msgspec.structs.replace(HOLDS, verdict="unknown", reason="no rank could be started", properties={})

CAUGHT = PlantOutcome(
    id="max-of-norms",
    kind="norm and clipping",
    bugs=("a/b#1",),
    properties=("norm",),
    stages=("norm",),
    symptoms=(),
    seed=1,
    caught=True,
    found_after=FoundAfter(seconds=0.25, examples=4),
    examples=4,
    seconds=1.5,
    case=CaseSize(world=2, parameters=1, elements=3, bucket=4, steps=1, parts=2),
    failure=FAILURE,
    judgement=Judgement(location=True, naming=Naming.NONE, place=None),
)
MISSED = msgspec.structs.replace(
    CAUGHT, id="never-seen", caught=False, found_after=None, case=None, failure=None, judgement=None, examples=400
)
CONTROL = ControlOutcome(id="adds-pairwise", seed=2, verdict="holds", examples=100, seconds=4.0)
ALARM = ControlOutcome(id="plain-zero", seed=2, verdict="violated", examples=2, seconds=4.0, failure=FAILURE)


def museum(*plants: PlantOutcome, controls: tuple[ControlOutcome, ...] = (CONTROL,), **fields: Any) -> MuseumResult:
    """A museum of these."""
    summary = summarise(plants, controls, left_out=3)
    given: dict[str, Any] = {
        "verdict": verdict_of(summary, complete=True),
        "backend": "sim",
        "worlds": (1, 2),
        "seed": 7,
        "workers": 2,
        "seconds_per_plant": 20.0,
        "examples_per_control": 100,
        "seconds": 75.0,
        "versions": {"torch": "2.13.0"},
    }
    return MuseumResult(summary=summary, plants=plants, controls=controls, **{**given, **fields})


def told(result: Result | MuseumResult, name: str = "run.jsonl", **fields: Any) -> Told:
    """What a file with this result tells."""
    return Told(name, "museum" if isinstance(result, MuseumResult) else result.verb, result, **fields)


def hostile() -> Result:
    """Every text that a subject, a case or a file can choose is as bad as can be, and long where it may be long."""
    long = HOSTILE + "x" * 10_000
    found = EVIDENCE.map
    if found is None:
        raise ValueError("no map")
    evidence = msgspec.structs.replace(
        EVIDENCE,
        map=msgspec.structs.replace(
            found,
            quantity=HOSTILE,
            parameters=(MapParameter(HOSTILE, 0, 7),),
            values=(WrongValue(rank=0, parameter=HOSTILE, element=0, expected=HOSTILE, actual=HOSTILE, ulps=1),),
        ),
    )
    account = RankAccount(
        rank=0, cause=True, end=long, step=0, stage=HOSTILE, num_collectives=1, last_collectives=(long,), where=long,
        stacks=long, output=long,
    )  # fmt: skip
    names = (
        "property stage parameter expected actual expected_bits actual_bits pattern inputs symptom message scenario "
        "output case test replay cut_short"
    )
    texts = dict.fromkeys(names.split(), long)
    failure = Failure(**texts, symptoms_possible=(long,), ranks=(account,), evidence=evidence)  # type: ignore[arg-type]
    return msgspec.structs.replace(
        VIOLATED,
        subject=long,
        backend=HOSTILE,
        failure=failure,
        reason=long,
        properties={HOSTILE: 1},
        reached={HOSTILE: 3},
        missing=(HOSTILE,),
        changed={HOSTILE: 1},
        recycled=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
    )
