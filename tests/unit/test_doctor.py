"""What `doctor` concludes: each reading must come out otherwise when the measurement does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from harness.doctor import examination, machine, product_readings, products, readings, show, trees
from harness.doctor.examination import Examination, reason_of, run_doctor, why_unanswered
from harness.doctor.findings import DoctorResult, Finding, Verdict, by_reason, over_worlds, overall, unmeasured
from harness.doctor.messages import (
    AdamWReport,
    AverageReport,
    CallReport,
    Condition,
    Describe,
    Description,
    LatencyReport,
    MeasureAdamW,
    MeasureAverage,
    MeasureLatency,
    MeasureOrder,
    MeasureProducts,
    MeasureRepeats,
    MeasureRounding,
    MeasureSpecials,
    MeasureStrided,
    MeasureSubnormals,
    ModeReport,
    OrderReport,
    ProductsReport,
    RepeatsReport,
    Report,
    RoundingReport,
    SpecialsReport,
    StridedReport,
    SubnormalReport,
    ViewReport,
    decode_task,
    encode,
)
from harness.doctor.numerics import measure_rounding, measure_subnormals
from harness.launch.pool import Outcome, PoolError, RankEnd, RankReport
from harness.oracles import order, probing

WORLDS = (2, 3, 4)

# What this project's facts say of a good machine.
TORCH = Description(torch="2.13.0", numpy="2", gloo=True, nccl=False, gpus=0, cpu_capability="AVX2", threads=1)
EQUAL = ModeReport()
FUSED = ModeReport(differing=9, cases=3, largest=1e-7, against_single=20)
ADAMW = AdamWReport(
    cases=4,
    elements=4_000_000,
    steps=3,
    special_elements=100,
    modes={"foreach=False": EQUAL, "foreach=True": EQUAL, "fused=True": FUSED},
)
ROUNDING = RoundingReport(
    patterns=1_000,
    ties=10,
    subnormals=10,
    wrong=0,
    example=None,
    placed=0,
    nans=5,
    lost=0,
    nan_patterns=("0xffff",),
    nan_patterns_alone=("0xffff",),
    nan_made="0xffc00000",
)
SUBNORMALS = SubnormalReport(elements=9, wrong={"sum": 0, "product": 0}, zeros={"sum": 0, "product": 0})
SPECIALS = SpecialsReport(elements=9, wrong={"fp32": 0}, nans={"fp32": "0xffc00000", "bf16": "0x7fc0"})
CALL = CallReport(
    kind="all_reduce",
    dtype="fp32",
    num_elements=24,
    held=24,
    predicted=24,
    no_tree=0,
    probes=3,
    sums_wrong=0,
    order_shows=8,
)
ORDER = OrderReport(calls=(CALL,), shown="all_reduce fp32 of 24 elements", trees=("chunk 0: ((1+2)+0)",))
AVERAGE = AverageReport(
    elements=10, divided={"fp32": 0}, multiplied={"fp32": 3}, scaled_before={"fp32": 4}, distinct={"fp32": 4}
)
REPEATS = RepeatsReport(repeats=20, collectives={"all_reduce fp32 of 6": ("a",)}, passes={"fp32": ("p",)})
STRIDED = StridedReport(views={"transposed": ViewReport(elements=6, wrong=3, outside=6, changed=3)})
PRODUCTS = ProductsReport(
    shapes=("3x5", "768x2304"),
    threads=(2, 3, 4),
    differing={"norm fp32": dict.fromkeys(Condition, ()), "products bf16": dict.fromkeys(Condition, ())},
    left_out={"norm fp32": (), "products bf16": ()},
)
LATENCY = LatencyReport(elements=256, median_ms=3.0)


def changed(report: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(report, **fields)


def on(report: Any, world: int = 3) -> dict[int, list[Any]]:
    """The same report from every rank of a world."""
    return {world: [report] * world}


def products_of(condition: Condition) -> ProductsReport:
    """One product of two has other bits under ``condition``."""
    found = dict.fromkeys(Condition, ()) | {condition: ("768x2304",)}
    return changed(PRODUCTS, differing={**PRODUCTS.differing, "products bf16": found})  # type: ignore[no-any-return]


def order_of(**fields: Any) -> dict[int, list[OrderReport]]:
    return on(changed(ORDER, calls=(changed(CALL, **fields),)))


FOREACH_DIFFERS = changed(ADAMW, modes={**ADAMW.modes, "foreach=True": changed(EQUAL, differing=1, cases=1)})
MODES_DIFFER = changed(ADAMW, modes={**ADAMW.modes, "foreach=True": changed(EQUAL, against_single=1)})
SPECIAL_DIFFERS = changed(ADAMW, modes={**ADAMW.modes, "foreach=False": changed(EQUAL, special_differing=1)})
MODES_DIFFER_SPECIAL = changed(ADAMW, modes={**ADAMW.modes, "foreach=True": changed(EQUAL, special_against_single=1)})
FUSED_EQUAL = changed(ADAMW, modes={**ADAMW.modes, "fused=True": EQUAL})
NO_FUSED = changed(ADAMW, modes={**ADAMW.modes, "fused=True": ModeReport(error="RuntimeError: no fused")})
NO_FOREACH = changed(ADAMW, modes={**ADAMW.modes, "foreach=True": ModeReport(error="RuntimeError: no foreach")})
TWO_PATTERNS = changed(ROUNDING, nan_patterns_alone=("0x7fc0",))
ONE_PATTERN = changed(SPECIALS, nans={"bf16": "0xffff"})
EXACT_VIEW = StridedReport(views={"transposed": ViewReport(elements=6, outside=6)})
REFUSED_VIEW = StridedReport(views={"transposed": ViewReport(error="ValueError: not contiguous")})
UNSTEADY = changed(REPEATS, collectives={"all_reduce fp32 of 6": ("a", "b")})
DRIFTING = [REPEATS, changed(REPEATS, collectives={"all_reduce fp32 of 6": ("b",)}), REPEATS]
OWN_PIECES = [changed(REPEATS, collectives={"reduce_scatter fp32 of 6": (digest,)}) for digest in "abc"]
OTHER_PASS = [REPEATS, REPEATS, changed(REPEATS, passes={"fp32": ("q",)})]
INEXACT_AVERAGE = changed(AVERAGE, divided={"fp32": 1})
SCALED_AVERAGE = changed(AVERAGE, divided={"fp32": 4}, scaled_before={"fp32": 0})
POWER_OF_TWO = changed(AVERAGE, multiplied={"fp32": 0}, scaled_before={"fp32": 0}, distinct={"fp32": 0})

ALL_SLOW = changed(PRODUCTS, left_out=dict.fromkeys(PRODUCTS.differing, PRODUCTS.shapes))

OK, NOTE, PROBLEM, UNKNOWN = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM, Verdict.UNKNOWN

READ: list[tuple[str, Callable[[], Finding], Verdict, str]] = [
    ("torch", lambda: readings.read_torch(TORCH, "2.13.0+cpu"), OK, "what follows holds for it"),
    ("another torch", lambda: readings.read_torch(TORCH, "2.12.1"), NOTE, "another torch"),
    ("old torch", lambda: readings.read_torch(changed(TORCH, torch="2.9.1+cpu"), "2.9.1"), PROBLEM, "Older than"),
    ("no gloo", lambda: readings.read_torch(changed(TORCH, gloo=False), "2.13.0"), PROBLEM, "without gloo"),
    ("foreach", lambda: readings.read_adamw_mode(ADAMW, "foreach=True"), OK, "alike wherever"),
    ("foreach differs", lambda: readings.read_adamw_mode(FOREACH_DIFFERS, "foreach=True"), PROBLEM, "called wrong"),
    ("special differs", lambda: readings.read_adamw_mode(SPECIAL_DIFFERS, "foreach=False"), PROBLEM, "called wrong"),
    ("no foreach", lambda: readings.read_adamw_mode(NO_FOREACH, "foreach=True"), UNKNOWN, "trust none"),
    ("fused", lambda: readings.read_adamw_mode(ADAMW, "fused=True"), NOTE, "depends on where"),
    ("fused equal", lambda: readings.read_adamw_mode(FUSED_EQUAL, "fused=True"), OK, "No dependence"),
    ("no fused", lambda: readings.read_adamw_mode(NO_FUSED, "fused=True"), UNKNOWN, "No verdict"),
    ("modes", lambda: readings.read_adamw_agreement(ADAMW), OK, "the same bits"),
    ("modes differ", lambda: readings.read_adamw_agreement(MODES_DIFFER), PROBLEM, "different bits"),
    ("modes differ at nan", lambda: readings.read_adamw_agreement(MODES_DIFFER_SPECIAL), PROBLEM, "different bits"),
    ("no modes", lambda: readings.read_adamw_agreement(NO_FOREACH), UNKNOWN, "trust none"),
    ("rounding", lambda: readings.read_rounding(ROUNDING), OK, "ties to even"),
    ("truncation", lambda: readings.read_rounding(changed(ROUNDING, wrong=1, example="0x1")), PROBLEM, "0x1"),
    ("placed", lambda: readings.read_rounding(changed(ROUNDING, placed=1)), PROBLEM, "where it lies"),
    ("nan", lambda: readings.read_nan(ROUNDING, on(SPECIALS)), NOTE, "as a mask"),
    ("nan, one pattern", lambda: readings.read_nan(ROUNDING, on(ONE_PATTERN)), OK, "one pattern"),
    ("nan, two patterns", lambda: readings.read_nan(TWO_PATTERNS, on(ONE_PATTERN)), NOTE, "as a mask"),
    ("nan lost", lambda: readings.read_nan(changed(ROUNDING, lost=1), on(SPECIALS)), PROBLEM, "into a number"),
    (
        "nan lost in a sum",
        lambda: readings.read_nan(ROUNDING, on(changed(SPECIALS, nans={"fp32": "0.0, no nan"}))),
        PROBLEM,
        "into a number",
    ),
    ("subnormals", lambda: readings.read_subnormals(SUBNORMALS), OK, "neither lost"),
    (
        "flushed",
        lambda: readings.read_subnormals(changed(SUBNORMALS, wrong={"sum": 9}, zeros={"sum": 9})),
        PROBLEM,
        "flushed to zero",
    ),
    ("wrong", lambda: readings.read_subnormals(changed(SUBNORMALS, wrong={"sum": 9})), PROBLEM, "is wrong"),
    ("subnormal sums", lambda: readings.read_subnormal_sums(on(SPECIALS)), OK, "keep"),
    (
        "subnormal sums flushed",
        lambda: readings.read_subnormal_sums(on(changed(SPECIALS, wrong={"fp32": 2}))),
        PROBLEM,
        "lose or change",
    ),
    ("ranks", lambda: readings.read_ranks(on(LATENCY), {1: 2.0}), OK, "most of what"),
    ("slow ranks", lambda: readings.read_ranks(on(changed(LATENCY, median_ms=80.0)), {1: 2.0}), NOTE, "slow"),
    ("order", lambda: readings.read_order(3, on(ORDER)[3]), OK, "the order the rule says"),
    ("order at 2", lambda: readings.read_order(2, on(ORDER, 2)[2]), OK, "prove nothing"),
    ("other order", lambda: readings.read_order(3, order_of(predicted=23)[3]), PROBLEM, "all_reduce fp32"),
    ("no order", lambda: readings.read_order(3, order_of(predicted=20, no_tree=4)[3]), PROBLEM, "another order"),
    ("no elements", lambda: readings.read_order(3, order_of(held=0, predicted=0)[3]), UNKNOWN, "trust none"),
    ("sums", lambda: readings.read_sums(on(ORDER)), OK, "reproduces"),
    ("sums differ", lambda: readings.read_sums(order_of(sums_wrong=1)), PROBLEM, "all_reduce fp32 at world 3"),
    ("sums of nothing", lambda: readings.read_sums(order_of(held=0)), UNKNOWN, "trust none"),
    ("sums that show nothing", lambda: readings.read_sums(order_of(order_shows=0)), UNKNOWN, "trust none"),
    ("AVG", lambda: readings.read_average(on(AVERAGE)), NOTE, "AVG is sum / W here"),
    ("AVG scales", lambda: readings.read_average(on(SCALED_AVERAGE)), NOTE, "AVG is the sum of x / W here"),
    ("AVG of its own", lambda: readings.read_average(on(INEXACT_AVERAGE)), NOTE, "a way of its own"),
    ("AVG at 2", lambda: readings.read_average(on(POWER_OF_TWO, 2)), NOTE, "no power of two"),
    ("no AVG", lambda: readings.read_average(on(AverageReport(error="RuntimeError: no"))), NOTE, "must sum and divide"),
    ("repeats", lambda: readings.read_repeats(on(REPEATS)), OK, "the same each time"),
    ("own pieces", lambda: readings.read_repeats({3: OWN_PIECES}), OK, "the same each time"),
    ("unsteady", lambda: readings.read_repeats(on(UNSTEADY)), PROBLEM, "from run to run"),
    ("drifting", lambda: readings.read_repeats({3: DRIFTING}), PROBLEM, "drift apart"),
    ("passes", lambda: readings.read_passes(on(REPEATS)), OK, "equal gradients"),
    ("passes differ", lambda: readings.read_passes({3: OTHER_PASS}), PROBLEM, "different bits"),
    ("same matrix", lambda: product_readings.read_same(PRODUCTS), OK, "on whichever rank owns the matrix"),
    (
        "same matrix, another time",
        lambda: product_readings.read_same(products_of(Condition.REPEAT)),
        PROBLEM,
        "from time to time or from place to place (products bf16)",
    ),
    ("same matrix, elsewhere", lambda: product_readings.read_same(products_of(Condition.PLACE)), PROBLEM, "(products"),
    ("same matrix, on threads", lambda: product_readings.read_same(products_of(Condition.THREADS)), OK, "as many"),
    ("no products", lambda: product_readings.read_same(ALL_SLOW), UNKNOWN, "trust none"),
    *(
        (f"{name}{what}", partial(product_readings.read_condition, report, condition), verdict, says[verdict])
        for condition, name, says in (
            (Condition.BATCH, "batches", {OK: "one at a time", NOTE: "must batch as the system"}),
            (Condition.COLUMNS, "storage", {OK: "did not matter", NOTE: "the same view"}),
            (Condition.THREADS, "threads", {OK: "did not matter", NOTE: "on as many threads"}),
        )
        for what, report, verdict in (
            ("", PRODUCTS, OK),
            (" differ", products_of(condition), NOTE),
            (" repeat", products_of(Condition.REPEAT), OK),
        )
    ),
    ("strided", lambda: readings.read_strided(on(STRIDED)), NOTE, "Silently wrong"),
    ("strided right", lambda: readings.read_strided(on(EXACT_VIEW)), OK, "come out right here"),
    ("strided refused", lambda: readings.read_strided(on(REFUSED_VIEW)), OK, "refused"),
    ("lost ranks", lambda: examination.lost_ranks(["a", "b", "a"]), PROBLEM, "ends processes"),
]

VERSIONS = machine.Versions(
    packages={"torch": "2.13.0", "numpy": "2"}, system="Linux 6", machine="x86_64", libc="glibc 2"
)
CORES = machine.Cores(usable=2, online=4, quota=None, load=0.5)
MEMORY = machine.Memory(total=8 * 2**30, available=6 * 2**30, limit=None)
SPACE = machine.Space(path="/somewhere", total=2**34, free=2**33)
LOOPBACK = machine.Loopback(name="lo", interface=True, round_trip_us=9.0)

READ += [
    ("versions", lambda: machine.read_versions(VERSIONS), OK, "another version"),
    (
        "no torch",
        lambda: machine.read_versions(changed(VERSIONS, packages={"torch": "not installed", "numpy": "2"})),
        PROBLEM,
        "Ranks need torch",
    ),
    ("cores", lambda: machine.read_cores(CORES), OK, "the same bits"),
    ("one core", lambda: machine.read_cores(changed(CORES, usable=1)), NOTE, "one core"),
    ("quota", lambda: machine.read_cores(changed(CORES, quota=0.5)), NOTE, "one core"),
    ("busy", lambda: machine.read_cores(changed(CORES, load=9.0)), NOTE, "busy"),
    ("memory", lambda: machine.read_memory(MEMORY), OK, "preset states"),
    ("low memory", lambda: machine.read_memory(changed(MEMORY, available=2**30)), NOTE, "not for the presets"),
    ("limited memory", lambda: machine.read_memory(changed(MEMORY, limit=2**28)), PROBLEM, "killed"),
    ("shm", lambda: machine.read_shared_memory(SPACE), OK, "do not use it"),
    ("small shm", lambda: machine.read_shared_memory(changed(SPACE, free=2**26)), NOTE, "--shm-size"),
    ("no shm", lambda: machine.read_shared_memory(changed(SPACE, error="No such file")), NOTE, "--shm-size"),
    ("tmp", lambda: machine.read_temporary(SPACE), OK, "private directory"),
    ("full tmp", lambda: machine.read_temporary(changed(SPACE, free=2**20)), NOTE, "free some space"),
    ("no tmp", lambda: machine.read_temporary(changed(SPACE, error="Read-only")), PROBLEM, "set TMPDIR"),
    ("loopback", lambda: machine.read_loopback(LOOPBACK), OK, "can talk"),
    ("slow loopback", lambda: machine.read_loopback(changed(LOOPBACK, round_trip_us=1e4)), NOTE, "slowly"),
    ("no loopback", lambda: machine.read_loopback(changed(LOOPBACK, error="refused")), PROBLEM, "interface up"),
    ("no interface", lambda: machine.read_loopback(changed(LOOPBACK, interface=False)), PROBLEM, "will not find it"),
]


@pytest.mark.parametrize(("read", "verdict", "says"), [case[1:] for case in READ], ids=[case[0] for case in READ])
def test_the_reading_follows_the_measurement(read: Callable[[], Finding], verdict: Verdict, says: str) -> None:
    found = read()
    assert found.verdict is verdict
    assert says in found.meaning
    assert all(len(line) <= show.COLUMNS for line in show.finding_lines(found))
    msgspec.json.encode(found)


def test_only_all_elements_are_a_hundred_percent() -> None:
    found = readings.read_order(3, order_of(held=10**7, predicted=10**7 - 1)[3])
    assert "predicts 99.99 % of" in found.measured
    assert "predicts 100 % of" in readings.read_order(3, on(ORDER)[3]).measured


# --- trees ------------------------------------------------------------------------------------------------------------


def probed(rule: order.Order, world: int) -> dict[probing.Pair, np.ndarray[Any, np.dtype[np.float32]]]:
    num_elements = rule.labels.size
    return {
        pair: order.add(rule, [np.full(num_elements, probing.probe(pair, rank), np.float32) for rank in range(world)])
        for pair in probing.pairs(world)
    }


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_trees_that_follow_the_rule_are_all_predicted(world: int) -> None:
    rule = order.gloo("all_reduce", 8 * world, world)
    revealed = trees.reveal(probed(rule, world), world)
    assert trees.score(revealed, rule) == (8 * world, 0, 8 * world)


def test_another_order_is_not_predicted_and_is_shown() -> None:
    rule = order.gloo("all_reduce", 24, 3)
    revealed = trees.reveal(probed(order.in_rank_order(3, 24), 3), 3)
    # The last chunk of the ring happens to be added in rank order.
    assert trees.score(revealed, rule) == (8, 0, 24)
    assert trees.lines(revealed) == ["chunk 0, elements 0-23: ((0+1)+2)"]


def test_an_element_without_a_tree_does_not_hide_the_others() -> None:
    rule = order.gloo("all_reduce", 24, 3)
    sums = probed(rule, 3)
    sums[0, 1][5] = np.nan
    sums[0, 1][6] = 2.0
    revealed = trees.reveal(sums, 3)
    assert trees.score(revealed, rule) == (22, 2, 24)
    assert "chunk 1, elements 5-5: no fixed order" in trees.lines(revealed)


def test_no_elements_have_no_trees() -> None:
    rule = order.gloo("all_reduce", 24, 3).slice(24, 24)
    revealed = trees.reveal(probed(rule, 3), 3)
    assert trees.score(revealed, rule) == (0, 0, 0)
    assert trees.lines(revealed) == []


def test_readable_trees_do_not_depend_on_which_summand_came_first() -> None:
    assert trees.readable(((2, 1), 0)) == trees.readable((0, (1, 2))) == "((1+2)+0)"
    assert trees.readable((3, ((0, 1), 2))) == "(((0+1)+2)+3)"


# --- measuring --------------------------------------------------------------------------------------------------------


def test_flushed_subnormals_are_seen() -> None:
    """The measurement itself, on a process that flushes where its processor can."""
    assert not any(measure_subnormals().wrong.values())
    flushes = torch.set_flush_denormal(True)
    try:
        report = measure_subnormals()
    finally:
        torch.set_flush_denormal(False)
    assert bool(report.zeros["fp32 sum"]) == flushes


def test_rounding_looks_at_every_kind_of_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a conversion that cuts off instead is found."""
    task = MeasureRounding(num_random=1_000, seed=1)
    report = measure_rounding(task)
    assert min(report.ties, report.subnormals, report.nans) > 100
    assert (report.wrong, report.lost, report.placed) == (0, 0, 0)
    monkeypatch.setattr(
        "harness.doctor.numerics._to_bf16",
        lambda values, _device: (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16),
    )
    cut_off = measure_rounding(task)
    assert cut_off.wrong > 1_000
    assert cut_off.example is not None
    assert cut_off.lost > 0  # 0x7f800001 becomes infinity


def _sum_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.sum(-1, keepdim=True)


def _depends_on(condition: Condition) -> products.Operation:
    """An operation whose result is another one under ``condition`` alone."""
    calls = iter(range(1_000))
    first_place: list[int] = []

    def operation(matrix: torch.Tensor) -> torch.Tensor:
        first_place.append(matrix.data_ptr() % 64)
        shows = {
            Condition.REPEAT: next(calls) > 0,
            Condition.PLACE: matrix.dim() == 2 and matrix.is_contiguous() and first_place[-1] != first_place[0],
            Condition.BATCH: matrix.dim() == 3,
            Condition.COLUMNS: not matrix.is_contiguous(),
            Condition.THREADS: torch.get_num_threads() > 1,
        }
        return _sum_of_rows(matrix) + float(shows[condition])

    return operation


@pytest.mark.parametrize("condition", Condition)
def test_a_product_that_depends_on_something_is_seen(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = {
        "steady": (_sum_of_rows, torch.float64),
        "swaying": (_depends_on(condition), torch.bfloat16),
    }
    monkeypatch.setattr(products, "OPERATIONS", operations)
    monkeypatch.setattr(products, "SHAPES", ((4, 32),))
    threads = torch.get_num_threads()
    report = products.measure_products(MeasureProducts(seed=1))
    assert torch.get_num_threads() == threads
    assert not any(report.differing["steady"].values())
    found = {each for each, shapes in report.differing["swaying"].items() if shapes == ("4x32",)}
    assert condition in found
    assert found == (set(Condition) if condition is Condition.REPEAT else {condition})


def test_every_operation_of_newton_schulz_is_measured_on_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", ((3, 5), (7, 256)))
    report = products.measure_products(MeasureProducts(seed=1))
    assert report.shapes == ("3x5", "7x256")
    assert list(report.differing) == list(report.left_out) == ["norm fp32", "products fp32", "products bf16"]
    assert all(list(found) == list(Condition) for found in report.differing.values())


def test_what_is_too_slow_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", ((3, 5), (7, 256)))
    monkeypatch.setattr(products, "_TOO_SLOW_S", -1.0)
    report = products.measure_products(MeasureProducts(seed=1))
    assert set(report.left_out.values()) == {("3x5", "7x256")}
    assert product_readings.read_same(report).verdict is UNKNOWN
    monkeypatch.setattr(products, "_TOO_SLOW_S", 1e9)
    assert set(products.measure_products(MeasureProducts(seed=1)).left_out.values()) == {()}
    slow = changed(PRODUCTS, left_out={**PRODUCTS.left_out, "products bf16": ("768x2304",)})
    assert "products bf16 0, without 768x2304, too slow" in product_readings.read_same(slow).measured


def test_the_machine_is_measured_also_where_there_is_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert machine.measure_space(missing).error is not None
    assert machine.measure_space(tmp_path).error is None
    assert machine.measure_cores(missing).quota is None
    assert machine.measure_memory(missing).limit is None
    assert machine.measure_loopback().error is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert machine.measure_cores(tmp_path).quota == 1.5
    assert machine.measure_memory(tmp_path).limit == 2**30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.measure_cores(tmp_path).quota is None
    assert machine.measure_memory(tmp_path).limit is None


# --- a whole run, on ranks that need no process -----------------------------------------------------------------------

GOOD: Mapping[type, Report] = {
    Describe: changed(TORCH, torch=str(torch.__version__)),
    MeasureLatency: LATENCY,
    MeasureOrder: ORDER,
    MeasureRepeats: REPEATS,
    MeasureAverage: AVERAGE,
    MeasureAdamW: ADAMW,
    MeasureRounding: ROUNDING,
    MeasureSpecials: SPECIALS,
    MeasureSubnormals: SUBNORMALS,
    MeasureProducts: PRODUCTS,
    MeasureStrided: STRIDED,
}


def report_of(rank: int, end: RankEnd, reply: bytes | None = None, error: str | None = None) -> RankReport:
    return RankReport(rank, end, reply, (), error, "", None)


class CannedPool:
    """Answers as a good machine, except for what ``bad`` does with a world and a task."""

    def __init__(self, bad: Callable[[int, Any], Outcome | None] = lambda world, task: None) -> None:
        self.incidents: list[str] = []
        self.asked: list[tuple[int, type]] = []
        self._bad = bad

    def run(self, world: int, task: bytes, *, timeout_s: float) -> Outcome:
        decoded = decode_task(task)
        self.asked.append((world, type(decoded)))
        reply = encode(GOOD[type(decoded)])
        good = Outcome(world, tuple(report_of(rank, RankEnd.REPLIED, reply) for rank in range(world)), 0.1, None)
        return self._bad(world, decoded) or good


class Seen:
    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    def measuring(self, what: str) -> None:
        assert what

    def found(self, finding: Finding) -> None:
        assert finding.name not in self.findings
        self.findings[finding.name] = finding


def examined(pool: CannedPool) -> dict[str, Finding]:
    seen = Seen()
    Examination(pool, WORLDS, seen, seen.found).run()  # type: ignore[arg-type]
    return seen.findings


NAMES = {
    *("ranks", "torch", "order at world 2", "order at world 3", "order at world 4", "sums", "repeats"),
    *("forward, backward", "AVG", "AdamW foreach=False", "AdamW foreach=True", "AdamW fused=True", "AdamW modes"),
    *("rounding to bf16", "nan", "subnormals", "subnormal sums", "strided views"),
    *("Muon, same matrix", "Muon, batches", "Muon, storage order", "Muon, threads"),
}


def test_a_good_machine_is_ok() -> None:
    found = examined(CannedPool())
    assert set(found) == NAMES
    notes = {name for name, finding in found.items() if finding.verdict is not OK}
    assert notes == {"AVG", "AdamW fused=True", "nan", "strided views"}
    assert overall(found.values()) == "ok"


def test_a_world_that_hangs_is_not_asked_again() -> None:
    def hang(world: int, task: Any) -> Outcome | None:
        if world != 3 or not isinstance(task, MeasureOrder):
            return None
        return Outcome(3, tuple(report_of(rank, RankEnd.TIMED_OUT) for rank in range(3)), 40.0, None)

    pool = CannedPool(hang)
    found = examined(pool)
    assert set(found) == NAMES
    assert [kind for world, kind in pool.asked if world == 3] == [MeasureLatency, MeasureOrder]
    assert "rank 0 had not answered after 60 s" in found["order at world 3"].measured
    assert found["order at world 4"].verdict is OK
    assert found["sums"].verdict is UNKNOWN
    assert overall(found.values()) == "unknown"


def test_a_rank_that_raises_costs_one_finding() -> None:
    def fail(world: int, task: Any) -> Outcome | None:
        if not isinstance(task, MeasureRounding):
            return None
        error = "Traceback (most recent call last):\n  File ...\nValueError: odd"
        return Outcome(world, (report_of(0, RankEnd.RAISED, error=error),), 1.0, 0)

    found = examined(CannedPool(fail))
    unknown = {name: finding.measured for name, finding in found.items() if finding.verdict is UNKNOWN}
    assert unknown == dict.fromkeys(("rounding to bf16", "nan"), "not measured: rank 0 raised: ValueError: odd")


def test_no_strided_answer_decides_nothing() -> None:
    def crash(world: int, task: Any) -> Outcome | None:
        if not isinstance(task, MeasureStrided):
            return None
        reports = tuple(report_of(rank, RankEnd.KILLED, error="signal 11 (SIGSEGV)") for rank in range(world))
        return Outcome(world, reports, 1.0, 1)

    found = examined(CannedPool(crash))
    assert found["strided views"].measured == "not measured: world 2, 3, 4: rank 1 killed: signal 11 (SIGSEGV)"
    assert overall(found.values()) == "ok"


def test_worlds_that_cannot_start_are_a_problem() -> None:
    def refuse(world: int, task: Any) -> Outcome | None:
        if world < 4:
            return None
        raise PoolError("world 4: rank 1 did not start: Traceback (most recent call last):\n  ...\nOSError: full\nx")

    pool = CannedPool(refuse)
    pool.incidents.append("world 2: rank 0 ended")
    found = examined(pool)
    assert set(found) == {*NAMES, "lost ranks"}
    assert found["ranks"].verdict is PROBLEM
    assert found["ranks"].measured == "cannot be started: world 4: rank 1 did not start: x"
    assert found["sums"].measured == "not measured: world 4: its ranks had failed before (ranks)"
    assert overall(found.values()) == "problem"


def test_a_pool_that_cannot_be_made_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(examination, "RankPool", refuse)
    result = run_doctor(WORLDS, Seen())
    assert (result.verdict, result.exit_code) == ("problem", 3)
    assert "No space left on device" in result.findings[-1].measured


def test_an_interruption_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "RankPool", interrupt)
    result = run_doctor(WORLDS, Seen())
    assert (result.interrupted, result.exit_code) == (True, 130)
    assert result.verdict in ("unknown", "problem")
    assert len(result.findings) == 6
    assert "interrupted" in show.result_lines(result)[0]


# --- the verdict over all ---------------------------------------------------------------------------------------------


def test_the_overall_verdict_and_its_exit_code() -> None:
    good = readings.read_subnormals(SUBNORMALS)
    bad = readings.read_order(3, order_of(predicted=1)[3])
    vital, idle = unmeasured("a", "why", relied_on=True), unmeasured("b", "why", relied_on=False)

    def result(*findings: Finding) -> DoctorResult:
        return DoctorResult(
            verdict=overall(findings), backend="gloo", worlds=WORLDS, seconds=1.0, findings=findings, versions={}
        )

    assert (result(good, idle).verdict, result(good, idle).exit_code) == ("ok", 0)
    assert (result(good, vital).verdict, result(good, vital).exit_code) == ("unknown", 3)
    assert (result(vital, bad).verdict, result(vital, bad).exit_code) == ("problem", 3)
    said = "\n".join(show.result_lines(result(good, vital, bad)))
    assert "cannot be trusted here, or it will fail: order at world 3" in said
    assert "could not be measured: a" in said


def test_a_problem_at_one_world_outweighs_what_another_did_not_answer() -> None:
    wrong = order_of(sums_wrong=1)
    missing = {4: "gone"}
    assert over_worlds("sums", wrong, missing, readings.read_sums, relied_on=True).verdict is PROBLEM
    assert over_worlds("sums", on(ORDER), missing, readings.read_sums, relied_on=True).verdict is UNKNOWN
    assert over_worlds("sums", on(ORDER), {}, readings.read_sums, relied_on=True).verdict is OK
    assert over_worlds("sums", {}, missing, readings.read_sums, relied_on=True).verdict is UNKNOWN
    with pytest.raises(ValueError, match="neither"):
        over_worlds("sums", {}, {}, readings.read_sums, relied_on=True)


def test_reasons_are_one_line() -> None:
    assert reason_of("one line") == "one line"
    assert reason_of("") == "no reason given"
    assert reason_of("Traceback (most recent call last):\n  File\nOSError: x") == "OSError: x"
    assert (
        reason_of("rank 0: Traceback (most recent call last):\n f\nOSError: x\nIts output:\ny") == "rank 0: OSError: x"
    )
    assert by_reason({2: "a", 3: "b", 4: "a"}) == "world 2, 4: a; world 3: b"
    ends = (report_of(0, RankEnd.REPLIED, b""), report_of(1, RankEnd.EXITED, error="exit code 3"))
    assert why_unanswered(Outcome(2, ends, 1.0, 1), 5.0) == "rank 1 exited: exit code 3"
