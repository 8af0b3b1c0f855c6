"""`museum`: score the harness on planted bugs and right classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from harness import inputs
from harness.capacity import worker_processes
from harness.cli.options import events_option, json_option, seed_option
from harness.cli.running import deliver, streams
from harness.errors import UsageError
from harness.report import result as results
from harness.report.console import TextConsole

if TYPE_CHECKING:
    from harness.scenario.model import System

DEFAULT_PLANT_SECONDS = 20.0

MUSEUM_EXAMPLES = """\b
Examples:
  zero2-harness museum
  zero2-harness museum --plant max-of-norms --plant facebookresearch/fairscale#167
  zero2-harness museum --backend gloo --seconds-per-plant 60 --json museum.json
  zero2-harness museum --show max-of-norms
"""

MUSEUM_EXIT_CODES = """\b
Exit codes:
  0    holds: every plant that was run was caught and every control held
  1    violated: a plant was missed, a control was violated (a false alarm), a symptom was wrong, or fewer than 95 %
       of the plants caught have the right property and stage
  2    bad usage: one line says what
  3    unknown: not violated, but something is undecided: an exhibit in which nothing was found in fewer scenarios
       than there are situations to reach, or one that could not be run or judged; it says which and why
  130  interrupted: what came of the exhibits so far is written
"""


@click.command(
    short_help="Score the harness: planted bugs, and right classes.",
    epilog=MUSEUM_EXAMPLES + "\n" + MUSEUM_EXIT_CODES,
)
@click.option(
    "--plant",
    "plants",
    multiple=True,
    metavar="NAME",
    help="Run this plant alone, and no control: its id, its class, or a public bug (owner/repository#number, or its "
    "address); repeatable.",
)
@click.option(
    "--show",
    "shown",
    multiple=True,
    metavar="NAME",
    help="Run nothing, but tell what is known of this plant or control (named as with --plant); repeatable.",
)
@click.option("--list", "listed", is_flag=True, help="Run nothing, but list all plants, their bugs, and all controls.")
@click.option(
    "--backend",
    type=click.Choice(["sim", "gloo", "nccl"]),
    default="sim",
    show_default=True,
    help="All ranks of a world in one process, or a process each.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="With gloo or nccl: every plant, not only those that need processes (on sim all run). What only a simulated "
    "world shows is left out.",
)
@click.option("--no-controls", is_flag=True, help="Only the plants.")
@click.option(
    "--system",
    type=click.Choice(["zero_master", "muon", "strategy"]),
    help="Only plants and controls of this kind of system (default: of all).",
)
@click.option(
    "--seconds-per-plant",
    type=float,
    callback=inputs.seconds,
    default=DEFAULT_PLANT_SECONDS,
    show_default=True,
    metavar="S",
    help="No scenario begins after so long (for Muon and strategies three times); what was found is explained for a "
    "while longer.",
)
@click.option(
    "--workers",
    type=int,
    callback=inputs.whole(1, 1024),
    metavar="K",
    help="Processes that run campaigns, each with ranks of its own (default: with sim as many as there are cores for, "
    "else 1).",
)
@seed_option
@click.option("--report", metavar="DIR", help=f"Where failing cases are saved (default: ./{inputs.DEFAULT_REPORT}/).")
@json_option
@events_option
def museum(
    *,
    plants: tuple[str, ...],
    shown: tuple[str, ...],
    listed: bool,
    backend: str,
    everything: bool,
    no_controls: bool,
    system: System | None,
    seconds_per_plant: float,
    workers: int | None,
    seed: int | None,
    report: str | None,
    json_path: str | None,
    events_path: str | None,
) -> int:
    """Score the harness: a campaign over every planted bug, and over classes that are right in another way.

    Each plant stands for one or more public bugs: the same mechanism where such a class can have it, else the same kind
    (its label says which). Its campaign is an ordinary one: the same scenarios as of `verify`, from a seed of its own;
    whatever is known of the plant is used only to judge what was told: property and stage, symptom, rank and parameter.
    A control is a right class that does something another way:
    at most 100 scenarios of it, and a violation is a false alarm. `replay` runs any case that was saved.
    """
    if shown or listed:
        if plants or json_path is not None or events_path is not None:
            raise UsageError(
                "--show and --list run nothing: give neither --plant nor --json nor --events (`list --json` has all)"
            )
        return _museum_lookup(shown, listed, system)
    from harness.museum import show
    from harness.museum.campaign import WORLDS, MuseumOptions, run_museum
    from harness.museum.selection import select
    from harness.recording import MuseumRecording, concluded, kept, open_log

    chosen = select(plants, backend=backend, everything=everything, controls=not no_controls, system=system)
    inputs.check_backend(backend, WORLDS)
    num_workers = worker_processes(backend, WORLDS, 1 if workers is None and backend != "sim" else workers)
    options = MuseumOptions(
        plants=chosen.plants,
        controls=chosen.controls,
        seed=inputs.random_seed() if seed is None else seed,
        workers=num_workers,
        report=inputs.prepare_report(report),
        backend=backend,
        seconds_per_plant=seconds_per_plant,
    )
    inputs.check_apart([("--json", json_path), ("--events", events_path)])
    output = None if json_path is None else inputs.JsonOutput(json_path)
    log = open_log(events_path)
    with streams(output) as (out, errors), kept(log):
        TextConsole(out).say(f"seed {options.seed}")
        if chosen.simulated_only:
            TextConsole(errors).say(show.left_to_sim(len(chosen.simulated_only)))
        display = show.MuseumProgress(errors)
        with display if log is None else MuseumRecording(display, log, options) as progress:
            result = run_museum(options, progress)
        code = deliver(output, result, result.exit_code)
        concluded(log, result, code)
        show.print_result(out, result)
        return code


def _museum_lookup(shown: Sequence[str], listed: bool, system: System | None) -> int:
    from harness.museum import lookup
    from harness.museum.selection import find

    exhibits = {each.id: each for name in shown for each in find("--show", name)}
    blocks = [lookup.exhibit_lines(each) for each in exhibits.values()]
    if listed:
        blocks.append(lookup.listing_lines(system))
    with streams(None) as (out, _):
        TextConsole(out).say("\n\n".join("\n".join(lines) for lines in blocks))
    return results.EXIT_HOLDS
