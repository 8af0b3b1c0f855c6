"""`doctor` on real ranks: one run, and all that it must have found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def test_doctor_measures_what_the_harness_relies_on(cli: CommandLine) -> None:
    """The facts of this project hold here; both forms of the result come from the same run."""
    done = cli.run("doctor", "--json", "doctor.json")
    assert done.stderr == ""
    result = json.loads((cli.directory / "doctor.json").read_text())
    problems = {finding["name"] for finding in result["findings"] if finding["verdict"] not in ("ok", "note")}
    # On some machines the bits of a matrix product depend on where its factors lie; all else holds on each.
    assert problems <= {"Muon, same matrix"}, done.stdout
    verdict = "problem" if problems else "ok"
    assert done.returncode == (3 if problems else 0), done.stdout
    assert {key: result[key] for key in ("schema", "verdict", "backend", "worlds", "interrupted")} == {
        "schema": 1,
        "verdict": verdict,
        "backend": "gloo",
        "worlds": [2, 3, 4],
        "interrupted": False,
    }
    assert result["seconds"] > 0
    assert "torch" in result["versions"]
    found = {finding["name"]: finding for finding in result["findings"]}

    for world in (2, 3, 4):
        order = found[f"order at world {world}"]["values"]
        assert order["predicted"] == order["elements"] > 10_000
        assert order["probes"] > 0
    assert found["order at world 3"]["values"]["trees"][0] == "chunk 0, elements 0-7: ((1+2)+0)"
    assert (found["sums"]["values"]["wrong"], found["sums"]["values"]["order_shows"] > 0) == (0, True)
    assert found["AVG"]["values"]["equals"] == ["sum / W"]
    assert found["AdamW fused=True"]["values"]["differing"] > 0
    assert found["AdamW fused=True"]["verdict"] == "note"
    assert found["AdamW foreach=False"]["values"]["elements"] > 1_000_000
    strided = found["strided views"]["values"]["every second column"]
    assert strided["wrong"] > 0
    assert strided["changed_outside"] > 0
    products = found["Muon, same matrix"]["values"]
    assert list(products["differing"]) == ["norm fp32", "products fp32", "products bf16"]
    assert "768x2304" in products["shapes"]
    differing = any(shapes[kind] for shapes in products["differing"].values() for kind in ("repeat", "place"))
    assert differing == bool(problems)
    assert {"Muon, batches", "Muon, storage order", "Muon, threads"} <= set(found)

    lines = done.stdout.splitlines()
    for name, finding in found.items():
        assert sum(line.startswith(f"{finding['verdict']:<9}{name} ") for line in lines) == 1
    assert any(line.startswith(f"{verdict}: gloo, world 2,3,4, ") for line in lines[-3:])
    # A path cannot be broken, and where temporary files are depends on who runs the tests.
    assert max(len(line) for line in lines if "/" not in line) <= 100
