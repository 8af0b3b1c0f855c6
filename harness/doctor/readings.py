"""What the measurements of the ranks mean: one function for each finding, of reports alone. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from harness.doctor.findings import Finding, Verdict, counted, unmeasured
from harness.doctor.messages import (
    AdamWReport,
    AverageReport,
    CallReport,
    Description,
    LatencyReport,
    OrderReport,
    RepeatsReport,
    RoundingReport,
    SpecialsReport,
    StridedReport,
    SubnormalReport,
)

MIN_TORCH = (2, 11)
SLOW_MS = 50.0
SINGLE, FOREACH, FUSED = MODES = ("foreach=False", "foreach=True", "fused=True")


def read_torch(found: Description, installed: str) -> Finding:
    """Whether the torch in a rank is the one installed, new enough, and has gloo."""
    verdict, meaning = Verdict.OK, "Ranks compute with this, and what follows holds for it."
    if not found.gloo:
        verdict, meaning = Verdict.PROBLEM, "This torch was built without gloo: ranks cannot form a group."
    elif _release(found.torch) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        verdict, meaning = Verdict.PROBLEM, f"Older than torch {wanted}, which the harness needs."
    elif found.torch.partition("+")[0] != installed.partition("+")[0]:
        verdict, meaning = Verdict.NOTE, f"Ranks import another torch than the one installed here, {installed}."
    gpus = counted(found.gpus, "GPU") if found.gpus else "no GPU"
    gpus += "".join(f", {name} {version}" for name, version in found.versions.items())
    return Finding(
        name="torch",
        verdict=verdict,
        measured=f"{found.torch}, {'' if found.gloo else 'no '}gloo, {'' if found.nccl else 'no '}nccl, {gpus}, "
        f"vector instructions {found.cpu_capability}, {counted(found.threads, 'thread')} a rank",
        meaning=meaning,
        relied_on=True,
        values=_plain(found),
    )


def _release(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


# --- AdamW ------------------------------------------------------------------------------------------------------------


def read_adamw_mode(report: AdamWReport, mode: str) -> Finding:
    """Whether AdamW in one mode treats an element alike wherever it lies."""
    name, relied_on = f"AdamW {mode}", mode != FUSED
    found = report.modes[mode]
    if found.error is not None:
        return unmeasured(name, found.error, relied_on=relied_on)
    differing = found.differing + found.special_differing
    if not differing:
        verdict = Verdict.OK
        meaning = "An element is updated alike wherever it lies: a flat shard can equal separate tensors, bit for bit."
        if not relied_on:
            meaning = "No dependence on position came up here; the harness does not use this mode all the same."
    elif relied_on:
        verdict = Verdict.PROBLEM
        meaning = "Right sharded optimizers would be called wrong: do not trust `verify` with this mode here."
    else:
        verdict = Verdict.NOTE
        meaning = (
            "Its result depends on where an element lies, so a flat shard cannot equal separate tensors: the harness "
            "does not use it, and a trainer that does differs in a last bit now and then."
        )
    return Finding(
        name=name,
        verdict=verdict,
        measured=f"flat vector against pieces: {_share(found.differing, report.elements)} elements differ in "
        f"{found.cases} of {report.cases} cases of {report.steps} steps"
        + (f", by up to {found.largest:.2g}" if found.differing else "")
        + f"; with inf, nan, 3e38 and subnormals {found.special_differing} of {report.special_elements:,}",
        meaning=meaning,
        relied_on=relied_on,
        values={"cases": report.cases, "elements": report.elements, "steps": report.steps, **_plain(found)},
    )


def read_adamw_agreement(report: AdamWReport) -> Finding:
    """Whether the loop and the multi-tensor AdamW are interchangeable; how fused compares is said beside it."""
    name, mode = "AdamW modes", FOREACH
    found, fused = report.modes[mode], report.modes[FUSED]
    error = found.error or report.modes[SINGLE].error
    if error is not None:
        return unmeasured(name, error, relied_on=True)
    beside = "" if fused.error else f"; {FUSED} in {_share(fused.against_single, report.elements)}"
    equal = not found.against_single and not found.special_against_single
    return Finding(
        name=name,
        verdict=Verdict.OK if equal else Verdict.PROBLEM,
        measured=f"flat vectors, against {SINGLE}: {mode} differs in {_share(found.against_single, report.elements)} "
        f"elements{beside}; with inf, nan, 3e38 and subnormals {mode} in {found.special_against_single} of "
        f"{report.special_elements:,}",
        meaning="foreach=False and True give the same bits: subject and reference may use either."
        if equal
        else "foreach=False and True give different bits: a comparison holds only with one mode on both sides.",
        relied_on=True,
        values={
            "elements": report.elements,
            "foreach": found.against_single,
            "fused": fused.against_single,
            "special_elements": report.special_elements,
            "special_foreach": found.special_against_single,
        },
    )


def read_adamw_on_cpu(report: AdamWReport) -> Finding:
    """Whether the reference would have the same bits on the CPU; it is judged on the GPU, where the subject is."""
    name, found = "AdamW on CPU and GPU", report.on_cpu
    if found is None:
        return unmeasured(name, "the ranks are on the CPU", relied_on=False)
    equal = not found.differing and not found.special_differing
    return Finding(
        name=name,
        verdict=Verdict.OK if equal else Verdict.NOTE,
        measured=f"{SINGLE}, on the GPU against the CPU: {_share(found.differing, report.elements)} elements differ in "
        f"{found.cases} of {report.cases} cases of {report.steps} steps"
        + (f", by up to {found.largest:.2g}" if found.differing else "")
        + f"; with inf, nan, 3e38 and subnormals {found.special_differing} of {report.special_elements:,}",
        meaning="The same bits on both: a run on GPUs can be held against one on the CPU."
        if equal
        else "GPU and CPU round otherwise: compare runs on one kind of device. The reference is on that of the ranks.",
        values={"cases": report.cases, "elements": report.elements, "steps": report.steps, **_plain(found)},
    )


# --- rounding ---------------------------------------------------------------------------------------------------------


def read_rounding(found: RoundingReport) -> Finding:
    """fp32 to bf16."""
    right = not found.wrong and not found.placed
    if right:
        meaning = "Compute weights are masters rounded to nearest, ties to even, here as in the reference."
    elif found.wrong:
        meaning = (
            f"bf16 weights do not round to nearest even ({found.example}): `verify` would call right systems wrong."
        )
    else:
        meaning = "How a weight rounds depends on where it lies: bf16 weights cannot be compared bit for bit."
    return Finding(
        name="rounding to bf16",
        verdict=Verdict.OK if right else Verdict.PROBLEM,
        measured=f"{found.wrong:,} of {found.patterns:,} fp32 patterns not rounded to nearest even ({found.ties:,} "
        f"ties, {found.subnormals:,} subnormals, all exponents), {found.placed:,} otherwise in pieces",
        meaning=meaning,
        relied_on=True,
        values=_plain(found),
    )


def read_nan(found: RoundingReport, specials: Mapping[int, Sequence[SpecialsReport]]) -> Finding:
    """What becomes of nan, alone and in collectives."""
    reports = [report for ranks in specials.values() for report in ranks]
    summed = sorted({f"{dtype} {bits}" for report in reports for dtype, bits in report.nans.items()})
    converted = sorted({*found.nan_patterns, *found.nan_patterns_alone})
    vanished = [text for text in summed if not text.partition(" ")[2].startswith("0x")]
    if found.lost or vanished:
        verdict, meaning = Verdict.PROBLEM, "A nan can turn into a number: a gradient gone wrong would pass unseen."
    elif len(converted) == 1 and all(text == f"bf16 {converted[0]}" for text in summed if text.startswith("bf16")):
        verdict, meaning = Verdict.OK, "nan stays nan, with one pattern in bf16."
    else:
        verdict = Verdict.NOTE
        meaning = "nan stays nan, but its bits say nothing: the harness compares nan as a mask, in digests too."
    in_sums = ", ".join(summed) or "not measured"
    return Finding(
        name="nan",
        verdict=verdict,
        measured=f"{found.nans - found.lost:,} of {found.nans:,} fp32 nan stay nan in bf16, as "
        f"{', '.join(converted)}; inf - inf is {found.nan_made}, in an all-reduce {in_sums}",
        meaning=meaning,
        relied_on=True,
        values={
            "nans": found.nans,
            "lost": found.lost,
            "converted": converted,
            "made": found.nan_made,
            "summed": summed,
        },
    )


def read_subnormals(found: SubnormalReport) -> Finding:
    """In one process."""
    wrong = {name: count for name, count in found.wrong.items() if count}
    flushed = any(found.zeros.values())
    if not wrong:
        meaning = "Tiny gradients are neither lost nor changed; exact sums down to 2^-149 can be judged."
    elif flushed:
        meaning = "Subnormal numbers are flushed to zero: exact comparisons of tiny gradients fail here."
    else:
        meaning = "Arithmetic on subnormal numbers is wrong: exact comparisons of tiny gradients fail here."
    listed = ", ".join(f"{name} {count:,}" for name, count in wrong.items())
    return Finding(
        name="subnormals",
        verdict=Verdict.PROBLEM if wrong else Verdict.OK,
        measured=f"wrong of up to {found.elements:,} each: {listed}"
        if wrong
        else f"kept by {', '.join(found.wrong)} ({found.elements:,} elements)",
        meaning=meaning,
        relied_on=True,
        values=_plain(found),
    )


def read_subnormal_sums(specials: Mapping[int, Sequence[SpecialsReport]]) -> Finding:
    """In an all-reduce."""
    wrong: Counter[str] = Counter()
    num_elements = 0
    for world, ranks in specials.items():
        for report in ranks:
            num_elements += report.elements * len(report.wrong)
            wrong.update({f"world {world} {dtype}": count for dtype, count in report.wrong.items() if count})
    listed = ", ".join(f"{name} {count:,}" for name, count in wrong.items())
    return Finding(
        name="subnormal sums",
        verdict=Verdict.PROBLEM if wrong else Verdict.OK,
        measured=f"all-reduce at world {_listed(specials)}: {wrong.total():,} of {num_elements:,} sums of subnormals "
        f"wrong{': ' if wrong else ''}{listed}",
        meaning="Collectives lose or change subnormal numbers: exact comparisons of tiny gradients fail here."
        if wrong
        else "Collectives keep subnormal numbers, in fp32 and bf16.",
        relied_on=True,
        values={"wrong": dict(wrong), "elements": num_elements},
    )


# --- collectives ------------------------------------------------------------------------------------------------------


def read_ranks(reports: Mapping[int, Sequence[LatencyReport]], seconds: Mapping[int, float]) -> Finding:
    """That groups form, and how long a small collective takes."""
    medians: dict[int, float] = {}
    for world, ranks in reports.items():
        medians[world] = max(report.median_ms for report in ranks)
    slow = [world for world, median in medians.items() if median > SLOW_MS]
    listed = ", ".join(f"{median:.1f} ms at {world}" for world, median in medians.items())
    return Finding(
        name="ranks",
        verdict=Verdict.NOTE if slow else Verdict.OK,
        measured=f"groups of {_listed(reports)} form (the first rank, with torch, in {seconds[1]:.1f} s); an "
        f"all-reduce of {next(iter(reports.values()))[0].elements} fp32 takes {listed}",
        meaning="Collectives are slow here: campaigns take long, and time-outs come closer."
        if slow
        else "The time of a small collective is most of what a scenario costs.",
        relied_on=True,
        values={"median_ms": medians, "seconds": dict(seconds)},
    )


def read_order(world: int, ranks: Sequence[OrderReport], backend: str = "gloo") -> Finding:
    """How well the rule predicts the order of addition at one world; without a rule, how much of it is fixed."""
    name = f"order at world {world}"
    calls = _calls(ranks)
    held = sum(call.held for call in calls)
    if not held:
        return unmeasured(name, "no element was compared", relied_on=True)
    predicted = sum(call.predicted for call in calls)
    treeless = sum(call.no_tree for call in calls)
    probes = sum(call.probes for call in ranks[0].calls)
    missed = Counter(f"{call.kind} {call.dtype}" for call in calls if call.predicted < call.held)
    ruled = backend == "gloo"
    lengths = [call.num_elements for call in calls]
    verdict, meaning = Verdict.OK, "Sums that round can be compared bit for bit: gloo adds in the order the rule says."
    if not ruled:
        verdict = Verdict.NOTE
        meaning = (
            f"No rule tells in which order {backend} adds: `verify` finds out by probing, and holds sums without a "
            "fixed order against the bound of any."
        )
    elif missed:
        verdict = Verdict.PROBLEM
        meaning = f"The reference would add in another order than {', '.join(missed)}: false violations may follow."
    elif world == 2:
        meaning = "A sum of two has one order: equal bits at world 2 prove nothing about order."
    shown = ranks[0]
    fixed = f", {treeless:,} added in no fixed order" if treeless else ""
    return Finding(
        name=name,
        verdict=verdict,
        measured=f"{'the rule predicts' if ruled else 'probing finds an order of'} {_percent(predicted, held)} of "
        f"{held:,} elements ({len(ranks[0].calls)} lengths "
        f"of {_kinds(calls)}, {min(lengths)} to {max(lengths):,} elements, {probes} probes){fixed}",
        meaning=meaning,
        relied_on=True,
        details=(f"{shown.shown}:", *(f"  {line}" for line in shown.trees)),
        values={
            "world": world,
            "elements": held,
            "predicted": predicted,
            "no_tree": treeless,
            "probes": probes,
            "percent": 100.0 * predicted / held,
            "missed": dict(missed),
            "shown": shown.shown,
            "trees": list(shown.trees),
        },
    )


def read_sums(reports: Mapping[int, Sequence[OrderReport]], backend: str = "gloo") -> Finding:
    """Whether adding random values in the predicted order gives the backend's bits."""
    per_world = {world: _calls(ranks) for world, ranks in reports.items()}
    calls = [call for of_world in per_world.values() for call in of_world]
    held, wrong = sum(call.held for call in calls), sum(call.sums_wrong for call in calls)
    shows = sum(call.order_shows for call in calls)
    for world, of_world in per_world.items():
        if not any(call.held for call in of_world):
            return unmeasured("sums", f"no element was compared at world {world}", relied_on=True)
        if world > 2 and backend == "gloo" and not any(call.order_shows for call in of_world):
            return unmeasured("sums", f"the values of world {world} add up alike in any order", relied_on=True)
    where = Counter(
        f"{call.kind} {call.dtype} at world {world}"
        for world, of_world in per_world.items()
        for call in of_world
        if call.sums_wrong
    )
    return Finding(
        name="sums",
        verdict=(Verdict.PROBLEM if backend == "gloo" else Verdict.NOTE) if wrong else Verdict.OK,
        measured=f"random values added in the {'predicted' if backend == 'gloo' else 'revealed'} order, fp32 and bf16: "
        f"{_share(wrong, held)} elements differ from {backend}'s (rank order would differ in {shows:,})",
        meaning=_meaning_of_sums(", ".join(where), backend),
        relied_on=True,
        values={"elements": held, "wrong": wrong, "order_shows": shows, "where": dict(where)},
    )


def _meaning_of_sums(where: str, backend: str) -> str:
    if where and backend == "gloo":
        return f"The reference does not reproduce {where}: do not trust verdicts on values that round."
    if where:
        return f"{where}: not what probing revealed; `verify` holds these sums against the bound of any order."
    return f"The reference reproduces {backend}'s sums, rounding included; bf16 is rounded after each addition."


def read_average(reports: Mapping[int, Sequence[AverageReport]]) -> Finding:
    """What ``ReduceOp.AVG`` is equal to."""
    name = "AVG"
    averages = [report for ranks in reports.values() for report in ranks]
    errors = [report.error for report in averages if report.error is not None]
    if errors:
        return Finding(
            name=name,
            verdict=Verdict.NOTE,
            measured=f"refused: {errors[0]}",
            meaning="Systems that average must sum and divide themselves; the harness does not use AVG.",
            values={"error": errors[0]},
        )
    totals = {
        words: sum(sum(getattr(report, field).values()) for report in averages)
        for field, words in (
            ("divided", "sum / W"),
            ("multiplied", "sum * (1/W)"),
            ("scaled_before", "the sum of x / W"),
        )
    }
    num_elements = sum(report.elements * len(report.divided) for report in averages)
    distinct = sum(sum(report.distinct.values()) for report in averages)
    equal = [words for words, count in totals.items() if not count]
    if not distinct:
        meaning = "At these worlds sum / W and the sum of x / W are the same: only a W that is no power of two tells."
    elif equal:
        meaning = f"AVG is {' and '.join(equal)} here; whoever scales before the sum gets other bits, and is not wrong."
    else:
        meaning = "AVG rounds in a way of its own: compare systems that use it on values that divide exactly."
    listed = ", ".join(f"{count:,} from {words}" for words, count in totals.items())
    return Finding(
        name=name,
        verdict=Verdict.NOTE,
        measured=f"of {num_elements:,} elements at world {_listed(reports)}, fp32 and bf16, differ: {listed}",
        meaning=meaning,
        values={
            "elements": num_elements,
            "differing": totals,
            "distinct": distinct,
            "equals": equal,
        },
    )


def read_repeats(reports: Mapping[int, Sequence[RepeatsReport]]) -> Finding:
    """Whether the same collective gives the same bits each time, and all-reduce the same on every rank."""
    unsteady, disagreeing = set(), set()
    num_repeats, num_calls = 0, 0
    for world, ranks in reports.items():
        for call in ranks[0].collectives:
            seen = [rank.collectives[call] for rank in ranks]
            num_calls += 1
            if any(len(digests) > 1 for digests in seen):
                unsteady.add(f"{call} at world {world}")
            elif call.startswith("all_reduce") and len(set(seen)) > 1:
                disagreeing.add(f"{call} at world {world}")
        num_repeats = ranks[0].repeats
    verdict, meaning = Verdict.OK, "Sums that round are the same each time, whichever rank comes late."
    if unsteady:
        verdict, meaning = Verdict.PROBLEM, "Sums change from run to run: no comparison of bits holds here."
    elif disagreeing:
        verdict, meaning = Verdict.PROBLEM, "Ranks get different bits from one all-reduce: they drift apart here."
    bad = sorted(unsteady | disagreeing)
    return Finding(
        name="repeats",
        verdict=verdict,
        measured=f"{num_calls} collectives at world {_listed(reports)}, {num_repeats} times each: "
        + (f"other bits in {', '.join(bad)}" if bad else "the same bits, and on all ranks of an all-reduce"),
        meaning=meaning,
        relied_on=True,
        values={"calls": num_calls, "repeats": num_repeats, "unsteady": sorted(unsteady), "disagreeing": bad},
    )


def read_passes(reports: Mapping[int, Sequence[RepeatsReport]]) -> Finding:
    """Whether forward and backward passes on equal data give equal bits, in every process."""
    seen: dict[str, set[str]] = {}
    all_ranks = [rank for ranks in reports.values() for rank in ranks]
    for rank in all_ranks:
        for dtype, digests in rank.passes.items():
            seen.setdefault(dtype, set()).update(digests)
    unequal = sorted(dtype for dtype, digests in seen.items() if len(digests) > 1)
    return Finding(
        name="forward, backward",
        verdict=Verdict.PROBLEM if unequal else Verdict.OK,
        measured=f"a small network, {all_ranks[0].repeats} times in each of {len(all_ranks)} processes, "
        + ", ".join(f"{dtype}: {counted(len(digests), 'result')}" for dtype, digests in seen.items()),
        meaning="Passes over equal data give different bits: `train` cannot compare two trainers here."
        if unequal
        else "Equal weights and equal data give equal gradients, in every process: `train` can compare two trainers.",
        relied_on=True,
        values={dtype: len(digests) for dtype, digests in seen.items()},
    )


def read_strided(reports: Mapping[int, Sequence[StridedReport]]) -> Finding:
    """What an all-reduce does to views that are not contiguous."""
    wrong: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for ranks in reports.values():
        for layout, view in ((layout, view) for report in ranks for layout, view in report.views.items()):
            elements[layout] += view.elements
            wrong[layout] += view.wrong
            changed[layout] += view.changed
            if view.error is not None:
                refused[layout] = view.error
    if wrong.total() or changed.total():
        verdict = Verdict.NOTE
        meaning = "Silently wrong, no error: hand collectives contiguous tensors only, and check that in your code."
    elif refused:
        verdict, meaning = Verdict.OK, "Views that are not contiguous are refused or come out right."
    else:
        verdict, meaning = Verdict.OK, "Views that are not contiguous come out right here; elsewhere they may not."
    listed = [
        f"{layout} refused"
        if layout in refused
        else f"{layout}: {wrong[layout]:,} of {elements[layout]:,} wrong, {changed[layout]:,} changed outside it"
        for layout in wrong
    ]
    return Finding(
        name="strided views",
        verdict=verdict,
        measured=f"all-reduce at world {_listed(reports)}; {'; '.join(listed)}",
        meaning=meaning,
        values={
            layout: {
                "wrong": wrong[layout],
                "elements": elements[layout],
                "changed_outside": changed[layout],
                "refused": refused.get(layout),
            }
            for layout in wrong
        },
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _calls(ranks: Sequence[OrderReport]) -> list[CallReport]:
    return [call for report in ranks for call in report.calls]


def _kinds(calls: Iterable[CallReport]) -> str:
    return ", ".join(dict.fromkeys(call.kind for call in calls))


def _listed(worlds: Iterable[int]) -> str:
    return ", ".join(map(str, worlds))


def _percent(part: int, whole: int) -> str:
    """Never 100 for less than all."""
    return "100 %" if part == whole else f"{int(1e4 * part / whole) / 1e2:.2f} %"


def _share(part: int, whole: int) -> str:
    """``3 of 2,000 (1,500 in a million)``."""
    return f"{part:,} of {whole:,}" + (f" ({1e6 * part / whole:,.3g} in a million)" if part else "")


def _plain(report: Struct) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(report)
    plain.pop("type", None)
    return plain
