"""What is wrong with a scenario of a Muon optimizer is said, with its place."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from harness.report.console import describe
from harness.scenario import muon_presets, presets
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Domain,
    Load,
    Parameter,
    Part,
    Reload,
    Scenario,
    Step,
    Values,
    check,
)
from harness.scenario.muon import Color, GlobalClip, Mark, Muon, MuonSettings, Sharding

WORLD = 6
MUON = Muon(
    marks=(
        Mark(muon=True, split="qkv", sizes=(3, 1, 2)),
        Mark(muon=True, split="heads", num_heads=2),
        Mark(color=0, use="twice"),
        Mark(color=1, main_grad=True),
    ),
    colors=(Color(((0, 1, 2), (3, 5))), Color(((0, 1, 2, 3, 4, 5),), divisor=12.0)),
    multiple=3,
)
SCENARIO = Scenario(
    world=WORLD,
    seed=1,
    parameters=(
        Parameter("qkv", (6, 4)),
        Parameter("experts", (2, 8, 3)),
        Parameter("bias", (5,)),
        Parameter("scale", (), "fp32"),
    ),
    values=Values(Domain.EXACT, 85, -4),
    optimizer=AdamW(),
    operations=(
        Build(30),
        Part(True, tuple(range(6)), ((),) * 6),
        Part(False, tuple(range(6, 12)), ((),) * 6),
        Step(),
        Reload(),
        Part(False, tuple(range(6)), ((),) * 6),
        Step(),
    ),
    system="muon",
    muon=MUON,
)


def marked(index: int, **changes: Any) -> Scenario:
    mark = replace(MUON.marks[index], **changes)
    return replace(SCENARIO, muon=replace(MUON, marks=(*MUON.marks[:index], mark, *MUON.marks[index + 1 :])))


def muon(**changes: Any) -> Scenario:
    return replace(SCENARIO, muon=replace(MUON, **changes))


def sharded(**changes: Any) -> Scenario:
    return muon(sharding=Sharding(**changes))


def colored(groups: Any, divisor: float | None = None) -> Scenario:
    return muon(colors=(Color(groups, divisor), MUON.colors[1]))


def values(**changes: Any) -> Scenario:
    return replace(SCENARIO, values=replace(SCENARIO.values, **changes))


def parameter(index: int, **changes: Any) -> Scenario:
    changed = replace(SCENARIO.parameters[index], **changes)
    return replace(SCENARIO, parameters=(*SCENARIO.parameters[:index], changed, *SCENARIO.parameters[index + 1 :]))


def optimizer(**changes: Any) -> Scenario:
    return replace(SCENARIO, optimizer=AdamW(**changes))


def operations(*added: Any) -> Scenario:
    return replace(SCENARIO, operations=(*SCENARIO.operations[:3], *added, *SCENARIO.operations[3:]))


REFUSED = [
    (replace(SCENARIO, muon=None), "muon: missing, system 'muon' needs it"),
    (replace(SCENARIO, system="zero_master"), "muon: given, but the system is 'zero_master'"),
    (muon(marks=MUON.marks[:3]), "muon.marks: 3 marks for 4 parameters"),
    (operations(Clip(1.0)), "operations[3]: a clip is no operation of system 'muon'"),
    (operations(Load(1)), "operations[3]: a load is no operation of system 'muon'"),
    (operations(Reload()), "operations[3]: a reload within a step"),
    (
        replace(SCENARIO, system="zero_master", muon=None),
        "operations[4]: a reload is no operation of system 'zero_master'",
    ),
    (parameter(0, strides="transposed"), "parameters[0].strides: of system 'muon'"),
    (parameter(0, shape=(24,)), "muon.marks[0].muon: 'qkv' has 1 dimensions, Muon needs 2 or more"),
    (parameter(1, shape=(0, 8, 3)), "muon.marks[1].muon: 'experts' has no elements"),
    (parameter(0, shape=(7, 4)), "muon.marks[0].sizes: blocks of 6 rows together, the matrix has 7"),
    (parameter(1, shape=(2, 7, 3)), "muon.marks[1].num_heads: 2 heads do not divide 7 rows"),
    (marked(0, sizes=(3, 3)), "muon.marks[0].sizes: split 'qkv' has 3 blocks, got 2"),
    (marked(0, num_heads=2), "muon.marks[0].num_heads: 2 with split 'qkv'"),
    (marked(0, split="none"), "muon.marks[0].sizes: with split 'none' there are none"),
    (marked(0, split="gate_up"), "muon.marks[0].sizes: split 'gate_up' has 2 blocks, got 3"),
    (marked(0, muon=False), "muon.marks[0].split: an element-wise parameter is not cut"),
    (marked(2, color=2), "muon.marks[2].color: no colour 2, there are 2"),
    (marked(2, color=None), "muon.colors[0]: no parameter is of it"),
    (marked(2, main_grad=True), "muon.marks[2].use: 'twice' with main_grad"),
    (muon(backward="assign"), "muon.marks[2].use: 'twice' needs muon.backward 'autograd'"),
    (sharded(skip_missing=True), "muon.marks[3].main_grad: with skip_missing"),
    (colored(((0, 2, 1),)), "muon.colors[0].groups[0]: expected ranks in ascending order"),
    (colored(((0, 1), (1, 2))), "muon.colors[0].groups[1]: rank 1 is in an earlier group already"),
    (colored(((4, 6),)), "muon.colors[0].groups[0]: no rank 6 in a world of 6"),
    (
        colored(((0, 1, 2, 3, 4),)),
        "muon.multiple: 3 is no multiple of 5: a mean over 5 (muon.colors[0].groups[0]) rounds",
    ),
    (colored(((0, 1, 2),), 0.7), "muon.multiple: 3 is no multiple of "),
    (colored(((0, 1, 2),), 2.0**150), "values.exponent: 2**-4 over 1.42725e+45 (muon.colors[0].divisor) underflows"),
    (colored(((0, 1, 2),), 2.0**-130), "values.exponent: sums over 7.34684e-40 (muon.colors[0].divisor) overflow"),
    (muon(release_color=1), "muon.release_color: parameters[3] of that colour is fp32"),
    (muon(release_color=2), "muon.release_color: no parameter is of colour 2"),
    (sharded(two_hop=True), "muon.sharding.local_world_size: two hops need the number of ranks of a node"),
    (sharded(local_world_size=4), "muon.sharding.local_world_size: nodes of 4 ranks do not make a world of 6"),
    (sharded(comm_overlap=True), "muon.sharding.accumulate_steps: 1 with overlap, but a step has 2 parts"),
    (optimizer(amsgrad=True), "optimizer.amsgrad: system 'muon' has none"),
    (optimizer(maximize=True), "optimizer.maximize: system 'muon' has none"),
    (optimizer(foreach=True), "optimizer.foreach: system 'muon' has none"),
    (values(max_k=86), "muon.multiple: integers up to 86 x 3 need more than bf16's 8 bits"),
    (values(exponent=-133), "values.exponent: half of 2**-133 is none of bf16 (parameters[2])"),
    (values(domain=Domain.GENERAL, special=3), "values.special: system 'muon' has no special values"),
    (
        replace(marked(2, use="reentrant"), values=Values(Domain.GENERAL, 85, -4)),
        "muon.marks[2].use: 'reentrant' gives halves",
    ),
    (values(domain=Domain.NORM_EXACT), "values.max_k: sums of squares reach"),
    (parameter(1, shape=(2, 2**14, 2**14)), "muon.marks: 3.17e+15 operations of Newton-Schulz in 2 steps on 6 ranks"),
]


def test_the_scenario_that_all_others_are_made_of_is_valid() -> None:
    assert check(SCENARIO) is None


@pytest.mark.parametrize(("scenario", "problem"), REFUSED, ids=lambda given: given if isinstance(given, str) else "")
def test_what_is_wrong_is_said_with_its_place(scenario: Scenario, problem: str) -> None:
    assert (check(scenario) or "").startswith(problem)


@pytest.mark.parametrize(
    "scenario",
    [
        values(exponent=-132),
        sharded(comm_overlap=True, accumulate_steps=2),
        muon(sharding=Sharding(comm_overlap=True), no_sync=True),
        sharded(two_hop=True, local_world_size=3),
        marked(0, split="gate_up", sizes=()),
        marked(0, split="gate_up", sizes=(5, 1)),
        muon(release_color=-1),
        colored(((0, 1, 2),), 0.75),
        muon(marks=tuple(Mark() for _ in MUON.marks), colors=()),
    ],
)
def test_what_is_just_possible_is_taken(scenario: Scenario) -> None:
    assert check(scenario) is None


def test_a_scenario_is_described_by_what_is_not_plain() -> None:
    assert describe(SCENARIO).endswith(
        "exact, reload, 2 matrices, cut as heads and qkv, 2 colours, used twice, main_grad"
    )
    other = replace(
        SCENARIO,
        muon=replace(
            MUON,
            marks=(Mark(muon=True), *(Mark() for _ in range(3))),
            colors=(),
            sharding=Sharding(
                fused=False,
                owner_rule="numel",
                comm_overlap=True,
                accumulate_steps=3,
                release_gradients=True,
                fuse_optimizer_states=True,
                two_hop=True,
                local_world_size=2,
                skip_missing=True,
            ),
            settings=MuonSettings(nesterov=False),
            clip=GlobalClip(1.0),
            backward="assign",
            no_sync=True,
            release_color=-1,
        ),
    )
    assert describe(other).endswith(
        "reload, 1 matrix, unfused, owners by size, overlap of 3 parts, no_sync, two hops over nodes of 2, assigned "
        "gradients, skip_missing, released gradients, released weights, fused states, clip, other settings"
    )


@pytest.mark.parametrize("name", ["tiny-mlp", "tiny-gpt", "gpt2", "qwen2.5-0.5b"])
def test_presets_are_marked_as_is_the_custom(name: str) -> None:
    listed = presets.parameters(name)
    marks = muon_presets.marks(listed)
    matrices = [each.name for each, mark in zip(listed, marks, strict=True) if mark.muon]
    assert matrices == [each.name for each in presets.muon_matrices(name)]
    for world in (1, 3, 4):
        made = muon_presets.campaign(listed, world, 2**22, 7)
        assert [check(each) for each in made] == [None] * 3
        assert [each.seed for each in made] == [7, 8, 9]
