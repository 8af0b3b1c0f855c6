"""`list`: what exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from harness import inputs
from harness.cli.options import EXIT_CODES, json_option
from harness.cli.running import complain, deliver, streams
from harness.errors import UsageError
from harness.report import result as results
from harness.report.console import TextConsole, listing_lines

LIST_EXAMPLES = """\b
Examples:
  zero2-harness list
  zero2-harness list --json -
  zero2-harness list --plan
  zero2-harness list --plan --preset llama-3.2-1b --world 16,32
"""


@click.command(
    "list", short_help="Show subjects, presets, properties, situations.", epilog=LIST_EXAMPLES + "\n" + EXIT_CODES
)
@click.option("--plan", is_flag=True, help="How evenly Muon's matrices are dealt out to ranks, by each owner rule.")
@click.option("--preset", "presets", multiple=True, metavar="NAME", help="With --plan: of this model; repeatable.")
@click.option(
    "--world", "worlds", callback=inputs.some_worlds, metavar="W[,W...]", help="With --plan: for so many ranks."
)
@json_option
def list_(*, plan: bool, presets: tuple[str, ...], worlds: tuple[int, ...] | None, json_path: str | None) -> int:
    """Show the built-in subjects, the presets, the properties and the situations; with --json the museum too.

    With --plan instead: which load the busiest rank has of the matrices of GPT-2 124M and Qwen2.5-0.5B on 8 and 64
    ranks, against what no plan can be below; by our owner rule, and by the original one.
    """
    if plan:
        return _list_plan(presets, worlds, json_path)
    if presets or worlds:
        raise UsageError("--preset and --world say of what a plan is to be shown: add --plan")
    from harness.faults.museum.catalogue import CONTROLS, LEFT_OUT, PLANTS
    from harness.scenario.presets import PRESETS
    from harness.scenario.systems import SITUATIONS
    from harness.subjects.builtin import BUILTIN
    from harness.verdict import PROPERTY_SUMMARIES, Property

    output = None if json_path is None else inputs.JsonOutput(json_path)
    shown: dict[str, Mapping[str, str] | Sequence[str]] = {
        "subjects": {name: item.summary for name, item in BUILTIN.items()},
        "presets": {name: item.summary for name, item in PRESETS.items()},
        "properties": {item.value: PROPERTY_SUMMARIES[item] for item in Property},
        "situations": [item.value for item in SITUATIONS["zero_master"]],
        "situations of muon": [item.value for item in SITUATIONS["muon"]],
        "situations of strategy": [item.value for item in SITUATIONS["strategy"]],
        "museum": {
            "plants": f"{len(PLANTS)} planted bugs, subjects museum:NAME; `museum --list` names them",
            "controls": f"{len(CONTROLS)} classes that are right in another way, subjects of the same kind",
        },
    }
    listing = {
        **shown,
        "plants": {plant.id: {"kind": plant.kind.value, "why": plant.why, "bugs": plant.bugs} for plant in PLANTS},
        "controls": {control.id: control.way for control in CONTROLS},
        "left_out": LEFT_OUT,
    }
    with streams(output) as (text, _):
        if output is None:
            TextConsole(text).say("\n".join(listing_lines(shown)))
        return deliver(output, listing, results.EXIT_HOLDS)


def _list_plan(presets: Sequence[str], worlds: Sequence[int] | None, json_path: str | None) -> int:
    from harness.balance import owners

    output = None if json_path is None else inputs.JsonOutput(json_path)
    try:
        answer = owners.ask(presets or owners.PRESETS, worlds or owners.WORLDS)
    except owners.UnansweredError as error:
        return complain(f"unknown: {error}", results.EXIT_UNKNOWN)
    with streams(output) as (text, _):
        if output is None:
            TextConsole(text).say("\n".join(owners.lines(answer)))
        return deliver(output, {"muon": owners.MUON, "balances": answer.balances}, results.EXIT_HOLDS)
