"""Case files: what is written is read back, and whatever else is read gives one line that names the field."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import CaseError, UsageError
from harness.scenario import codec
from harness.scenario.codec import Case, SubjectReference, decode, encode, load, load_parameters, save
from harness.scenario.model import (
    AdamW,
    Build,
    Clip,
    Discard,
    Domain,
    Load,
    Operation,
    Parameter,
    Part,
    Rate,
    Scenario,
    Skip,
    Source,
    Step,
    Values,
)
from harness.scenario.relations import Relation, RelationReference

few = settings(max_examples=60, deadline=None, database=None)

SCENARIO = Scenario(
    world=2,
    seed=5,
    parameters=(Parameter("layer.weight", (3, 4)), Parameter("größe", ())),
    values=Values(Domain.EXACT, max_k=255, exponent=-3),
    optimizer=AdamW(),
    operations=(Build(4), Part(False, (0, 1), ((), (1,))), Clip(0.1), Step(), Part(True, (0, 1), ((), ())), Discard()),
)
CASE = Case(
    SCENARIO,
    SubjectReference("zero.py:Zero", "/work/zero.py:Zero", {"a": 1, "b": 0.5, "c": "x", "d": None, "e": True}),
    {"property": "gradient", "step": 0, "message": "two\nlines", "elements": [1, 2.5, None]},
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Valid cases of any form, from the data model alone."""
    world = draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4))
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=len(shapes), max_size=len(shapes), unique=True))
    dtypes: st.SearchStrategy[Literal["bf16", "fp16", "fp32"]] = st.sampled_from(["bf16", "fp16", "fp32"])
    parameters = [Parameter(name, shape, draw(dtypes)) for name, shape in zip(names, shapes, strict=True)]
    parameters.append(Parameter("\x00always\x00", (2,)))
    indices = st.lists(st.integers(0, len(parameters) - 1), max_size=2, unique=True).map(tuple)
    operations: list[Operation] = [Build(draw(st.integers(1, 2**40)))]
    for last in (False, False, True)[draw(st.integers(0, 3)) :]:
        for _ in range(draw(st.integers(1, 2))):
            contributors = tuple(draw(st.integers(0, 2**31)) for _ in range(world))
            operations.append(Part(draw(st.booleans()), contributors, tuple(draw(indices) for _ in range(world))))
        ending: list[list[Operation]] = [
            [Step()],
            [Discard()],
            [Clip(draw(st.floats(min_value=5e-324, max_value=1e308))), Step()],
            [Skip(), Rate(draw(st.floats(0, 10))), Load(draw(st.integers(0, 255)))],
            [Step(), Build(draw(st.integers(1, 2**40)))],
        ]
        operations += draw(st.sampled_from(ending[:3] if last else ending))
    fraction = st.floats(0, 1, exclude_max=True)
    narrow = any(parameter.dtype == "fp16" for parameter in parameters)
    exponent, spread = (
        (draw(st.integers(-24, 0)), draw(st.integers(0, 8)))
        if narrow
        else (
            draw(st.integers(-133, 60)),
            draw(st.integers(0, 40)),
        )
    )
    special = 0 if narrow else draw(st.just(0) | st.integers(0, 1024))
    scenario = Scenario(
        world=world,
        seed=draw(st.integers(0, 2**63 - 1)),
        parameters=tuple(parameters),
        values=Values(
            Domain.GENERAL,
            draw(st.integers(1, 255)),
            exponent,
            spread,
            cancel=draw(st.booleans()),
            special=special,
            nonfinite=special > 0 and draw(st.booleans()),
        ),
        optimizer=AdamW(
            lr=draw(st.floats(0, 10)),
            beta1=draw(fraction),
            beta2=draw(fraction),
            foreach=draw(st.booleans()),
            amsgrad=draw(st.booleans()),
            maximize=draw(st.booleans()),
        ),
        operations=tuple(operations),
    )
    scalars = (
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    )
    arguments = st.dictionaries(st.text(max_size=5), scalars | st.text(max_size=5), max_size=3)
    subject = draw(st.none() | st.builds(SubjectReference, st.text(max_size=9), st.text(max_size=9), arguments))
    trees = st.recursive(scalars | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
    return Case(scenario, subject, draw(st.none() | st.dictionaries(st.text(max_size=5), trees, max_size=3)))


@few
@given(cases())
def test_what_is_encoded_decodes_to_the_same(case: Case) -> None:
    data = encode(case)
    assert decode(data) == case
    assert encode(decode(data)) == data


def test_a_case_file_is_plain_readable_json() -> None:
    text = encode(CASE).decode()
    fields = json.loads(text)
    assert list(fields)[:2] == ["version", "system"]
    assert (fields["version"], fields["world"], fields["operations"][2]) == (1, 2, {"op": "clip", "max_norm": 0.1})
    assert len(text.splitlines()) == 14 + len(SCENARIO.parameters) + len(SCENARIO.operations)
    assert text.endswith("}\n")


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file of CASE after ``change`` to its JSON."""
    fields = json.loads(encode(CASE))
    change(fields)
    return json.dumps(fields).encode()


def complaint(data: bytes) -> str:
    """The line that ``data`` gives."""
    with pytest.raises(CaseError) as caught:
        decode(data, "FILE")
    message = str(caught.value)
    assert message.isprintable()
    return message


def check_decodes_or_complains(data: bytes) -> None:
    try:
        case = decode(data, "FILE")
    except CaseError as error:
        line = str(error)
    else:
        assert decode(encode(case)) == case
        return
    assert line.startswith("FILE: ")
    assert line.isprintable()


def set_(*path: str | int, to: object) -> Callable[[dict[str, Any]], object]:
    def change(fields: dict[str, Any]) -> None:
        inner: Any = fields
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = to

    return change


def delete(*path: str | int) -> Callable[[dict[str, Any]], object]:
    def change(fields: dict[str, Any]) -> None:
        inner: Any = fields
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (set_("operations", 1, "none", 1, 0, to="x"), "$.operations[1].none[1][0]: expected `int`, got `str`"),
        (set_("operations", 1, "none", 1, 0, to=2), "$.operations[1].none[1]: no such parameter"),
        (set_("operations", 1, "none", 1, to=[1, 0, 1]), "$.operations[1].none[1]: a parameter stands twice"),
        (
            set_("operations", 1, "contributors", 0, to=2**31 + 1),
            "$.operations[1].contributors[0]: expected `int` <= 2147483648",
        ),
        (set_("operations", 1, "more", to=1), "$.operations[1].more: expected `bool`, got `int`"),
        (set_("operations", 1, "rank", to=1), "$.operations[1]: object contains unknown field `rank`"),
        (
            set_("operations", 3, "op", to="stop"),
            "$.operations[3].op: expected one of 'build', 'part', 'clip', 'step', 'discard', 'skip', 'rate', 'load', "
            "'reload', got 'stop'",
        ),
        (delete("operations", 3, "op"), "$.operations[3]: object missing required field `op`"),
        (delete("operations", 5), "$.operations: the last step is not finished by a step, a skip or a discard"),
        (set_("operations", to=[]), "$.operations: expected `array` of length >= 1"),
        (set_("operations", 2, "max_norm", to=0), "$.operations[2].max_norm: expected `float` > 0.0"),
        (
            set_("operations", 2, "max_norm", to=float("nan")),
            "$.operations[2].max_norm: expected a finite number, got nan",
        ),
        (set_("optimizer", "lr", to=float("-inf")), "$.optimizer.lr: expected a finite number, got -inf"),
        (set_("optimizer", "beta1", to=1), "$.optimizer.beta1: expected `float` < 1.0"),
        (set_("optimizer", "fused", to=True), "$.optimizer: object contains unknown field `fused`"),
        (set_("world", to=0), "$.world: expected `int` >= 1"),
        (set_("world", to=257), "$.world: expected `int` <= 256"),
        (set_("world", to=True), "$.world: expected `int`, got `bool`"),
        (set_("world", to=2.0), "$.world: expected `int`, got `float`"),
        (set_("world", to=None), "$.world: expected `int`, got `null`"),
        (delete("world"), "$: object missing required field `world`"),
        (set_("seed", to=-1), "$.seed: expected `int` >= 0"),
        (set_("seed", to=10**300), "$.seed: expected `int` <= 9223372036854775807"),
        (set_("parameters", 0, "shape", 1, to=-1), "$.parameters[0].shape[1]: expected `int` >= 0"),
        (set_("parameters", 0, "shape", to=3), "$.parameters[0].shape: expected `array`, got `int`"),
        (
            set_("parameters", 0, "dtype", to="int8"),
            "$.parameters[0].dtype: expected one of 'bf16', 'fp16', 'fp32', got 'int8'",
        ),
        (
            set_("parameters", 0, "name", to="größe"),
            "$.parameters[1].name: 'größe' is the name of parameters[0] already",
        ),
        (
            set_("parameters", 0, "name", to="\ud800"),
            "$.parameters[0].name: expected text, got a lone surrogate in '\\ud800'",
        ),
        (
            set_("values", "domain", to="x"),
            "$.values.domain: expected one of 'exact', 'norm-exact', 'general', got 'x'",
        ),
        (set_("values", "spread", to=1), "$.values.spread: must be 0 in domain 'exact'"),
        (set_("values", "cancel", to=True), "$.values.cancel: must be False in domain 'exact'"),
        (set_("values", "special", to=1), "$.values.special: must be 0 in domain 'exact'"),
        (set_("values", "special", to=1025), "$.values.special: expected `int` <= 1024"),
        (set_("values", "special", to=-1), "$.values.special: expected `int` >= 0"),
        (set_("values", "cancel", to=1), "$.values.cancel: expected `bool`, got `int`"),
        (
            set_("values", "nonfinite", to=True),
            "$.values.nonfinite: without special values there are none that are not finite",
        ),
        (set_("system", to="fsdp"), "$.system: expected one of 'zero_master', 'muon', 'strategy', got 'fsdp'"),
        (set_("system", to="muon"), "$.muon: missing, system 'muon' needs it"),
        (
            set_("subject", "args", "a", to=[1]),
            "$.subject.args[...]: expected `bool | int | float | str | null`, got `array`",
        ),
        (set_("subject", "args", "a", to=2**63), "$.subject.args[...]: expected `int` <= 9223372036854775807"),
        (set_("subject", "script", to="x"), "$.subject: object contains unknown field `script`"),
        (set_("subject", "absolute", to="x" * 5001), "$.subject.absolute: expected `str` of length <= 5000"),
        (set_("subject", "given", to="x" * 5001), "$.subject.given: expected `str` of length <= 5000"),
        (delete("subject", "absolute"), "$.subject: object missing required field `absolute`"),
        (set_("failure", to="x"), "$.failure: expected `object | null`, got `str`"),
        (set_("comment", to="x"), "$: object contains unknown field `comment`"),
        (set_("two\nlines\x1b[31m", to=1), "$: object contains unknown field `two\\nlines\\x1b[31m`"),
        (set_("version", to=2), "$.version: written by a newer version (2), this one reads up to 1"),
        (set_("version", to=0), "$.version: expected 1, got 0"),
        (set_("version", to="1"), "$.version: expected `int`, got `str`"),
        (set_("version", to=True), "$.version: expected `int`, got `bool`"),
        (delete("version"), "$: missing required field `version`"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_a_bad_field_gives_its_path_and_what_is_wrong(change: Callable[[dict[str, Any]], object], line: str) -> None:
    assert complaint(changed(change)) == f"FILE: {line}"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "expected JSON: Expecting value at line 1, column 1"),
        (b'{"version": 1\n;}', "expected JSON: Expecting ',' delimiter at line 2, column 1"),
        (encode(CASE)[:-3], "expected JSON: Expecting ',' delimiter at line 21, column 102"),
        (b"[]", "$: expected an object, got an array"),
        (b"null", "$: expected an object, got null"),
        (b"1e999", "$: expected a finite number, got inf"),
        (b'"\xff"', "expected UTF-8 text, got byte 0xff at 1"),
        (b"\x80\x04K\x01.", "expected UTF-8 text, got byte 0x80 at 0"),
        (b"[" * 100_000, "nested too deeply, expected at most 32 levels"),
        (b"[" * 40 + b"]" * 40, f"${'[0]' * 33}: nested too deeply, expected at most 32 levels"),
        (b'{"a": [{"b": 1, "c": 2, "b": 1}]}', "$.a[0]: the key 'b' stands twice"),
        (b"9" * 5000, "expected numbers of 64 bits, got one of thousands of digits"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_what_is_no_case_at_all_gives_one_line(data: bytes, line: str) -> None:
    assert complaint(data) == f"FILE: {line}"


def with_values(**fields: object) -> Callable[[dict[str, Any]], object]:
    def change(case: dict[str, Any]) -> None:
        case["values"] |= fields

    return change


@pytest.mark.parametrize("domain", ["exact", "norm-exact"])
@pytest.mark.parametrize(("field", "value"), [("spread", 1), ("cancel", True), ("special", 64)])
def test_only_general_values_spread_cancel_or_are_special(domain: str, field: str, value: int) -> None:
    change = with_values(domain=domain, max_k=1, exponent=0, **{field: value})
    assert complaint(changed(change)).startswith(f"FILE: $.values.{field}: must be ")
    general = with_values(domain="general", max_k=1, exponent=0, **{field: value})
    assert getattr(decode(changed(general)).scenario.values, field) == value


def test_special_values_need_parameters_that_can_hold_them() -> None:
    """Those of bf16 are beyond fp16; cancelling ones are not, nor are special ones beyond bf16 and fp32."""
    special = with_values(domain="general", special=1)
    assert decode(changed(special)).scenario.values.special == 1

    def with_dtype(dtype: str, change: Callable[[dict[str, Any]], object]) -> bytes:
        def both(case: dict[str, Any]) -> None:
            change(case)
            case["parameters"][1]["dtype"] = dtype

        return changed(both)

    assert decode(with_dtype("fp32", special)).scenario.values.special == 1
    line = "values.special: the special values are those of bf16, which an fp16 parameter cannot hold"
    assert complaint(with_dtype("fp16", special)) == f"FILE: $.{line}"
    assert decode(with_dtype("fp16", with_values(domain="general", cancel=True))).scenario.values.cancel


def test_values_that_are_not_finite_come_with_special_ones_only() -> None:
    line = "FILE: $.values.nonfinite: without special values there are none that are not finite"
    for fields in ({}, {"cancel": True}, {"special": 0}):
        assert complaint(changed(with_values(domain="general", nonfinite=True, **fields))) == line
    assert decode(changed(with_values(domain="general", nonfinite=True, special=1))).scenario.values.nonfinite


def test_a_file_from_before_the_newer_fields_of_values_is_read_as_it_was_meant() -> None:
    """No new version: what is missing means none of it, and a file of today says all of it."""

    def without(case: dict[str, Any]) -> None:
        for field in ("cancel", "special", "nonfinite"):
            del case["values"][field]

    for domain, spread in (("exact", 0), ("general", 9)):
        old = json.loads(encode(CASE))
        old["values"] = {"domain": domain, "max_k": 255, "exponent": -3, "spread": spread}
        read = decode(json.dumps(old).encode())
        assert read.scenario.values == Values(Domain(domain), 255, -3, spread, False, 0, False)
        assert decode(encode(read)) == read
    assert decode(changed(without)) == CASE


def scenario_fields(elements: int, bucket: int, world: int, parts: int, parameters: int = 1) -> dict[str, Any]:
    """Steps of one part each, over parameters of so many elements each."""
    part = {"op": "part", "more": False, "contributors": [0] * world, "none": [[]] * world}
    shapes = [{"name": f"w{index}", "shape": [elements]} for index in range(parameters)]
    operations = [{"op": "build", "bucket": bucket}, *[part, {"op": "step"}] * parts]
    return {**json.loads(encode(CASE)), "world": world, "parameters": shapes, "operations": operations}


SLOW = {"fault": "slow", "rank": 0, "step": 0, "stage": "reduce", "milliseconds": 2_000}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (scenario_fields(2**37, 2**37, world=2, parts=1), None),
        (
            scenario_fields(2**37 + 1, 2**37, world=2, parts=1),
            "operations: 1 parts x 137438953473 elements on 2 ranks are too much work, at most 274877906944 in all",
        ),
        (scenario_fields(2**20, 1, world=4, parts=4), None),
        (
            scenario_fields(2**20 + 1, 1, world=4, parts=4),
            "operations[0].bucket: 4 steps x 262145 buckets on 4 ranks are too much work, at most 4194304 in all",
        ),
        ({**scenario_fields(300, 1, world=1, parts=1), "faults": [SLOW]}, None),
        (
            {**scenario_fields(301, 1, world=1, parts=1), "faults": [SLOW]},
            "faults[0].milliseconds: 2000 ms at each of 301 buckets are too long, at most 600000 ms in all",
        ),
        (scenario_fields(1, 4096, world=128, parts=128, parameters=4096), None),
        (
            scenario_fields(1, 4097, world=128, parts=128, parameters=4097),
            "operations: 128 parts x 4097 parameters on 128 ranks are too much work, at most 67108864 in all",
        ),
    ],
    ids=["elements", "elements+", "buckets", "buckets+", "slow", "slow+", "tensors", "tensors+"],
)
def test_what_would_run_for_days_is_refused(fields: dict[str, Any], line: str | None) -> None:
    """Each limit holds to the last element, bucket and parameter; sizes in the file alone bound none of this."""
    data = json.dumps(fields).encode()
    if line is None:
        decode(data)
    else:
        assert complaint(data) == f"FILE: $.{line}"


def test_a_long_line_is_cut() -> None:
    assert len(complaint(changed(set_("x" * 10_000, to=1)))) <= 2000


def test_a_case_error_is_bad_usage() -> None:
    assert issubclass(CaseError, UsageError)
    assert UsageError.exit_code == 2
    assert str(UsageError("a\nb\x1b\u202e\udc80 ü")) == "a\\nb\\x1b\\u202e\\udc80 ü"


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The file of CASE with a few bytes replaced, removed, inserted or repeated."""
    data = bytearray(encode(CASE))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(0, 6))
        piece = draw(
            st.binary(max_size=3) | st.sampled_from([b"1e999", b"NaN", b"-1", b"null", b"[[", b'"', b"\\ud800"])
        )
        other = draw(st.integers(0, len(data) - 1))
        data[at : at + size] = draw(st.sampled_from([piece, bytes(data[other : other + size])]))
    return bytes(data)


@settings(few, max_examples=300)
@given(mutations())
def test_any_damage_to_a_file_gives_a_valid_case_or_one_line(data: bytes) -> None:
    check_decodes_or_complains(data)


@settings(few, max_examples=300)
@given(st.data())
def test_any_other_value_in_any_place_gives_a_valid_case_or_one_line(data: st.DataObject) -> None:
    """Damage to the JSON rather than to its text: most of it gets past the parser."""
    fields = json.loads(encode(CASE))
    inner: Any = fields
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inner[key], dict | list) or not inner[key] or data.draw(st.integers(0, 3)) == 0:
            break
        inner = inner[key]
    extremes = st.sampled_from(
        [0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.0, -0.0, 1e308, "", "x", "\ud800", None, True]
    )
    inner[key] = data.draw(extremes | st.lists(extremes, max_size=2) | st.dictionaries(st.just("op"), extremes))
    check_decodes_or_complains(json.dumps(fields).encode())


def test_a_case_of_an_older_version_is_migrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename_ranks(fields: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in fields.items() if name != "ranks"}, "world": fields["ranks"]}

    def rename_size(fields: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in fields.items() if name != "size"}, "ranks": fields["size"]}

    monkeypatch.setattr(codec, "MIGRATIONS", {0: rename_ranks, -1: rename_size})
    fields = json.loads(encode(CASE))
    del fields["world"]
    assert decode(json.dumps({**fields, "version": -1, "size": 2}).encode()) == CASE
    assert decode(json.dumps({**fields, "version": 0, "ranks": 2}).encode()) == CASE
    line = complaint(json.dumps({**fields, "version": 0}).encode())
    assert line == "FILE: $: no valid case of version 0: KeyError('ranks')"


def test_a_saved_case_is_loaded_again(tmp_path: Path) -> None:
    path = save(CASE, tmp_path / "new" / "cases", "gradient")
    assert path.parent == tmp_path / "new" / "cases"
    assert path.name.startswith("gradient-")
    assert load(path) == CASE
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_saving_again_changes_nothing_and_other_content_is_never_replaced(tmp_path: Path) -> None:
    path = save(CASE, tmp_path)
    before = path.stat()
    assert save(CASE, tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    other = save(Case(SCENARIO), tmp_path)
    assert other != path
    path.write_text("edited by hand")
    again = save(CASE, tmp_path)
    assert again not in (path, other)
    assert load(again) == CASE
    assert path.read_text() == "edited by hand"
    assert save(CASE, tmp_path) == again
    assert len(list(tmp_path.iterdir())) == 3


def test_a_dangling_link_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    name = save(CASE, tmp_path / "a").name
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).symlink_to(tmp_path / "nowhere")
    path = save(CASE, tmp_path / "b")
    assert path.name != name
    assert load(path) == CASE


def test_saving_at_the_same_time_gives_one_whole_file(tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(save(CASE, tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 8
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert load(paths[0]) == CASE


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(CASE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_case_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    endless = Scenario(1, 1, (Parameter("p", (1,)),), SCENARIO.values, AdamW(lr=float("inf")), (Build(1),))
    with pytest.raises(ValueError, match=r"cannot be saved: case: \$.optimizer.lr: expected `float`, got `null`"):
        save(Case(endless), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_non_finite_numbers_in_the_summary_become_null(tmp_path: Path) -> None:
    path = save(Case(SCENARIO, None, {"actual": float("nan")}), tmp_path)
    assert load(path).failure == {"actual": None}


@pytest.mark.parametrize("read", [load, load_parameters])
def test_what_cannot_be_read_gives_one_line(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(path: Path) -> str:
        with pytest.raises(CaseError) as caught:
            read(path)
        assert str(caught.value).isprintable()
        return str(caught.value)

    missing = tmp_path / "missing\n.json"
    assert line(missing) == f"{tmp_path}/missing\\n.json: no such file"
    assert line(tmp_path) == f"{tmp_path}: expected a JSON file, got a directory"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert line(pipe) == f"{pipe}: expected a JSON file, got something that is not a regular file"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert line(loop) == f"{loop}: Too many levels of symbolic links"
    assert line(Path("a\0b")) == "a\\x00b: embedded null byte"
    assert line(pipe / "x.json") == f"{pipe}/x.json: Not a directory"
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(codec.MAX_BYTES + 1)
    assert line(large) == f"{large}: expected at most 16777216 bytes, got more"
    (tmp_path / "text.json").write_bytes(b"\xff")
    assert line(tmp_path / "text.json") == f"{tmp_path}/text.json: expected UTF-8 text, got byte 0xff at 0"

    def denied(*_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root, who may run these tests, is refused nothing
    assert line(large) == f"{large}: Permission denied"


def test_a_list_of_parameters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('[{"name": "a", "shape": [3, 4]}, {"name": "b", "shape": []}, {"name": "c", "shape": [0]}]')
    assert load_parameters(path) == (Parameter("a", (3, 4)), Parameter("b", ()), Parameter("c", (0,)))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[]", "$: expected `array` of length >= 1"),
        ("{}", "$: expected `array`, got `object`"),
        ('[{"name": "a", "shape": [3, "4"]}]', "$[0].shape[1]: expected `int`, got `str`"),
        ('[{"name": "a", "shape": [-3]}]', "$[0].shape[0]: expected `int` >= 0"),
        ('[{"name": "a", "shape": [2.5]}]', "$[0].shape[0]: expected `int`, got `float`"),
        ('[{"name": "a", "shape": [NaN]}]', "$[0].shape[0]: expected a finite number, got nan"),
        ('[{"name": "a"}]', "$[0]: object missing required field `shape`"),
        ('[{"name": "", "shape": []}]', "$[0].name: expected `str` of length >= 1"),
        ('[{"name": "a", "shape": [], "dtype": "bf16"}]', "$[0]: object contains unknown field `dtype`"),
        ('[{"name": "a", "shape": [], "name": "b"}]', "$[0]: the key 'name' stands twice"),
        ('[{"name": "a", "shape": []}, {"name": "a", "shape": []}]', "$[1].name: 'a' is the name of $[0] already"),
        ('[{"name": "a", "shape": [0]}]', "$: expected 1 to 1099511627776 elements in all, got 0"),
        (
            '[{"name": "a", "shape": [1099511627776, 2]}]',
            "$: expected 1 to 1099511627776 elements in all, got 2199023255552",
        ),
    ],
)
def test_a_bad_list_of_parameters_gives_one_line(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(CaseError) as caught:
        load_parameters(path)
    assert str(caught.value) == f"{path}: {line}"


# --- relations and sources


def test_a_case_keeps_its_relation_and_where_values_come_from(tmp_path: Path) -> None:
    moved = (
        Parameter("a", (2,), "fp32", "transposed", (Source(0, 3, 4), Source(2, 0, 1))),
        Parameter("b", (3,)),
    )
    scenario = Scenario(1, 3, moved, Values(Domain.EXACT, 3, 0), AdamW(), (Build(2), Part(False, (0,), ((),)), Step()))
    case = Case(scenario, relation=RelationReference(Relation.WORLD, 5, (1, 2)))
    assert load(save(case, tmp_path)) == case


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ((Source(0, 0, 1),), "$.parameters[0].sources: 1 elements in all, the parameter has 2"),
        ((Source(0, 0, 3), Source(0, 3, 2)), "$.parameters[0].sources[1]: stops at 2, before its start at 3"),
    ],
)
def test_sources_must_give_the_parameters_elements(sources: tuple[Source, ...], problem: str) -> None:
    parameters = (Parameter("a", (2,), sources=sources),)
    scenario = Scenario(
        1, 3, parameters, Values(Domain.EXACT, 3, 0), AdamW(), (Build(2), Part(False, (0,), ((),)), Step())
    )
    with pytest.raises(CaseError, match=re.escape(problem)):
        decode(encode(Case(scenario)))


def test_an_unknown_relation_is_refused_with_those_that_there_are() -> None:
    scenario = Scenario(
        1, 3, (Parameter("a", (2,)),), Values(Domain.EXACT, 3, 0), AdamW(), (Build(2), Part(False, (0,), ((),)), Step())
    )
    text = encode(Case(scenario, relation=RelationReference(Relation.CUT))).replace(b'"cut"', b'"slice"')
    with pytest.raises(CaseError, match=r"\$\.relation\.name: expected one of 'bucket', 'world', .*, got 'slice'"):
        decode(text)
