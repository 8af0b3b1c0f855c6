"""What the measurement of matrix products means for Muon: when Newton-Schulz gives the same bits. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.doctor.findings import Finding, Verdict, unmeasured
from harness.doctor.messages import Condition, ProductsReport

SAME = "Muon, same matrix"
NAMES = {
    Condition.BATCH: "Muon, batches",
    Condition.COLUMNS: "Muon, storage order",
    Condition.THREADS: "Muon, threads",
}
_RELIED_ON = (Condition.REPEAT, Condition.PLACE)
_TRIED = {
    Condition.BATCH: "one of a stack of 1, 2, 3 against alone",
    Condition.COLUMNS: "stored by columns against by rows",
    Condition.THREADS: "{threads} threads against one",
}
_DEPENDS = {
    Condition.BATCH: "Blocks and experts orthogonalised together get other bits than one at a time: a reference must "
    "batch as the system does it is compared with.",
    Condition.COLUMNS: "A matrix stored the other way round gets other bits: a reference must hand Newton-Schulz the "
    "same view, not a copy of it.",
    Condition.THREADS: "Newton-Schulz gives the same bits only on as many threads: compare runs of equal thread "
    "counts. A rank of the harness has one.",
}
_EQUAL = {
    Condition.BATCH: "Matrices orthogonalised together get the bits that they get one at a time.",
    Condition.COLUMNS: "How a matrix is stored did not matter here.",
    Condition.THREADS: "The number of threads did not matter here; a rank of the harness has one all the same.",
}


def read_same(report: ProductsReport) -> Finding:
    """Whether a matrix gets the same bits each time and wherever it lies: what bitwise verdicts on Muon rest on."""
    differing = {
        name: sorted({shape for condition in _RELIED_ON for shape in found[condition]}, key=report.shapes.index)
        for name, found in report.differing.items()
    }
    if all(len(shapes) == len(report.shapes) for shapes in report.left_out.values()):
        return unmeasured(SAME, "every product took too long", relied_on=True)
    bad = [name for name, shapes in differing.items() if shapes]
    return Finding(
        name=SAME,
        verdict=Verdict.PROBLEM if bad else Verdict.OK,
        measured=f"again, and elsewhere in memory, {_counts(report, differing)}",
        meaning=f"One matrix gets other bits from time to time or from place to place ({', '.join(bad)}): bitwise "
        "verdicts on Muon cannot be trusted here."
        if bad
        else "Whole-matrix Newton-Schulz gives the same bits on whichever rank owns the matrix, if it has the same "
        "shape, is stored alike, is batched alike, on as many threads.",
        relied_on=True,
        values=_plain(report),
    )


def read_condition(report: ProductsReport, condition: Condition) -> Finding:
    """Whether the bits depend on ``condition``; no verdict rests on it, as both sides have the same one."""
    differing = {name: list(found[condition]) for name, found in report.differing.items()}
    depends = any(differing.values())
    tried = _TRIED[condition].format(threads=", ".join(map(str, report.threads)))
    return Finding(
        name=NAMES[condition],
        verdict=Verdict.NOTE if depends else Verdict.OK,
        measured=f"{tried}, {_counts(report, differing)}",
        meaning=_DEPENDS[condition] if depends else _EQUAL[condition],
        values={"differing": differing},
    )


def _counts(report: ProductsReport, differing: dict[str, list[str]]) -> str:
    """``other bits in norm fp32 0, products fp32 2 (3x5, 7x256), ... of 10 shapes``."""
    texts = []
    for name, shapes in differing.items():
        slow = report.left_out[name]
        listed = f" ({', '.join(shapes)})" if shapes else ""
        texts.append(f"{name} {len(shapes)}{listed}" + (f", without {', '.join(slow)}, too slow" if slow else ""))
    return (
        f"of {len(report.shapes)} shapes, {report.shapes[0]} to {report.shapes[-1]}, other bits in {'; '.join(texts)}"
    )


def _plain(report: ProductsReport) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(report)
    plain.pop("type", None)
    return plain
