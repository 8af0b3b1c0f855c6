"""`soak`: the harness itself, with faults among many scenarios."""

from __future__ import annotations

import os

import click

from harness import inputs
from harness.cli.options import (
    DEFAULT_SUBJECT,
    json_option,
    seed_option,
    stall_option,
    subject_options,
    timeout_option,
    worlds_option,
)
from harness.cli.running import deliver, streams
from harness.report.console import ProgressReport, TextConsole

SOAK_EXAMPLES = """\b
Examples:
  zero2-harness soak
  zero2-harness soak --examples 200 --every 5 --world 3 --json soak.json
"""

SOAK_EXIT_CODES = """\b
Exit codes:
  0    every verdict was right, and this process did not grow
  2    bad usage: one line says what
  3    the harness is broken: a verdict was wrong (its case is saved), or this process grew
  130  interrupted: the verdicts so far are written
"""


@click.command(
    short_help="Check the harness itself: faults among many scenarios.", epilog=SOAK_EXAMPLES + "\n" + SOAK_EXIT_CODES
)
@subject_options
@worlds_option("2,3", "Numbers of ranks, in turn.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "sim"]),
    default="gloo",
    show_default=True,
    help="Processes, or all ranks in one process.",
)
@click.option(
    "--examples", type=int, callback=inputs.whole(1), default=2000, show_default=True, metavar="N", help="Scenarios."
)
@click.option(
    "--every",
    type=int,
    callback=inputs.whole(1),
    default=20,
    show_default=True,
    metavar="K",
    help="Every K-th scenario has a fault.",
)
@click.option(
    "--seconds", type=float, callback=inputs.seconds, metavar="S", help="Stop after this long (default: no bound)."
)
@seed_option
@click.option("--report", metavar="DIR", help=f"Where a failing case is saved (default: ./{inputs.DEFAULT_REPORT}/).")
@json_option
@timeout_option
@stall_option
def soak(
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    worlds: tuple[int, ...],
    backend: str,
    examples: int,
    every: int,
    seconds: float | None,
    seed: int | None,
    report: str | None,
    json_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Check the harness itself: many scenarios one after the other on one pool, with faults among them.

    The subject should be a right one: then a scenario without a fault holds, and one in which a rank is killed, exits,
    raises, stops, hangs, is mute, skips, duplicates or corrupts a collective is violated, with that rank named; one in
    which a rank is only slow or late holds. Every other verdict is wrong. Over the soak, this process may not come to
    hold more memory, descriptors, threads or processes.
    """
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)
    from harness.soak import show
    from harness.soak.campaign import SoakOptions, run_soak
    from harness.subjects.source import parse

    options = SoakOptions(
        subject=parse(DEFAULT_SUBJECT if subject is None else subject, inputs.subject_arguments(subject_args)),
        worlds=worlds,
        backend=backend,
        examples=examples,
        every=every,
        seed=inputs.random_seed() if seed is None else seed,
        seconds=seconds,
        report=inputs.prepare_report(report),
        timeout_s=timeout,
        stall_s=stall,
    )
    output = None if json_path is None else inputs.JsonOutput(json_path)
    inputs.check_backend(backend, worlds)
    with streams(output) as (out, errors):
        TextConsole(out).say(f"seed {options.seed}")
        with ProgressReport(errors) as progress:
            progress.started(options)
            result = run_soak(options, progress)
        code = deliver(output, result, result.exit_code)
        show.print_result(out, result)
        return code
