"""`fuzz`: search on and on."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from harness import inputs
from harness.capacity import worker_processes
from harness.cli.options import (
    EXIT_CODES,
    config_option,
    events_option,
    json_option,
    stall_option,
    subject_options,
    timeout_option,
    worlds_option,
)
from harness.cli.running import deliver, result_of, streams, subject_of
from harness.errors import UsageError
from harness.report.console import print_result

DEFAULT_MINUTES = 10.0

FUZZ_EXAMPLES = """\b
Examples:
  zero2-harness fuzz --minutes 10
  zero2-harness fuzz --subject ./zero2.py:Zero2 --minutes 480 --keep-going
  zero2-harness fuzz --examples 2000 --seed 7 --json fuzz.json
  zero2-harness fuzz --minutes 10 --merge /mnt/other/.zero2-fuzz/zero2-1a2b3c4d
"""


@click.command(
    short_help="Search on and on, with several processes; resumes.", epilog=FUZZ_EXAMPLES + "\n" + EXIT_CODES
)
@subject_options
@config_option
@worlds_option("1,2,3,4", "Numbers of ranks, in turn.")
@click.option(
    "--backend",
    type=click.Choice(["sim", "gloo"]),
    default="sim",
    show_default=True,
    help="All ranks of a world in one process, or a process each.",
)
@click.option(
    "--minutes",
    type=float,
    callback=inputs.seconds,
    metavar="M",
    help=f"Stop after this long (default: {DEFAULT_MINUTES:g}; with --examples no bound).",
)
@click.option(
    "--examples",
    type=int,
    callback=inputs.whole(1),
    metavar="N",
    help="Stop after so many scenarios, those of earlier runs of this campaign counted (default: no bound).",
)
@click.option(
    "--workers",
    type=int,
    callback=inputs.whole(1, 1024),
    metavar="K",
    help="Processes that search, each with ranks of its own (default: as many as there are cores for).",
)
@click.option(
    "--seed",
    type=int,
    callback=inputs.whole(0),
    metavar="N",
    help="The same seed gives the same scenarios in the same rounds (default: that of the campaign that goes on, else "
    "random).",
)
@click.option("--hypothesis-seed", type=int, callback=inputs.whole(0), metavar="N", help="The same as --seed.")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help=f"Where the campaign is kept, and found again by the next run (default: ./{inputs.DEFAULT_FUZZ}/NAME-DIGEST).",
)
@click.option("--fresh", is_flag=True, help="Begin at the first round again; what was found is kept and tried first.")
@click.option("--keep-going", is_flag=True, help="Go on after a violation, and collect one of each kind.")
@click.option(
    "--merge",
    multiple=True,
    metavar="DIR",
    help="Take over what another campaign found, of another machine, say; repeatable.",
)
@click.option("--report", metavar="DIR", help="Where failing cases are saved (default: in the campaign's directory).")
@json_option
@events_option
@timeout_option
@stall_option
def fuzz(
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    config_path: str | None,
    worlds: tuple[int, ...],
    backend: str,
    minutes: float | None,
    examples: int | None,
    workers: int | None,
    seed: int | None,
    hypothesis_seed: int | None,
    directory: str | None,
    fresh: bool,
    keep_going: bool,
    merge: tuple[str, ...],
    report: str | None,
    json_path: str | None,
    events_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Search for a violation for as long as there is time, with several processes side by side.

    The search is cut into rounds, which are the same for the same seed, whoever runs them. Each has a turn of its own:
    situation by situation, rare situations varied, sequences of operations, related scenarios that must give the same
    (of a MuonShardingOptimizer all but sequences of operations, whose state machine is ZeroMaster's); in most some
    features are off, so that rare combinations of the others get their turn. What is done is kept: started again, the
    campaign goes on where it stopped, however it was stopped. The first violation is made smaller and ends
    it, unless --keep-going. A campaign of 300 scenarios or more, worlds 3 and 4 among them, that has not reached every
    required situation is no pass (exit 3).
    """

    source = subject_of(subject, subject_args, config_path)
    if seed is not None and hypothesis_seed is not None and seed != hypothesis_seed:
        raise UsageError(f"--seed {seed} and --hypothesis-seed {hypothesis_seed}: they mean the same; give one of them")
    asked = hypothesis_seed if seed is None else seed
    inputs.check_backend(backend, worlds)
    num_workers = worker_processes(backend, worlds, workers)
    inputs.check_apart([("--json", json_path), ("--events", events_path)], [("--config", config_path)])
    output = None if json_path is None else inputs.JsonOutput(json_path)
    cases = None if report is None else inputs.prepare_report(report)

    from harness.fuzz import show
    from harness.fuzz.campaign import FuzzOptions, run_fuzz
    from harness.recording import FuzzRecording, concluded, kept, open_log
    from harness.runner import CampaignOptions

    campaign = CampaignOptions(
        subject=source,
        worlds=worlds,
        backend=backend,
        seed=inputs.random_seed() if asked is None else asked,
        examples=examples or 0,
        seconds=None,
        bucket=None,
        parameters=None,
        report=cases or inputs.DEFAULT_REPORT,
        timeout_s=timeout,
        stall_s=stall,
    )
    options = FuzzOptions(
        campaign=campaign,
        seed=asked,
        seconds=60 * minutes if minutes is not None else None if examples is not None else 60 * DEFAULT_MINUTES,
        examples=examples,
        workers=num_workers,
        directory=None if directory is None else Path(directory),
        report=cases,
        fresh=fresh,
        keep_going=keep_going,
        merge=tuple(Path(each) for each in merge),
    )
    log = open_log(events_path)
    with streams(output) as (text, errors), kept(log):
        shown, run = show.FuzzProgress(errors), functools.partial(run_fuzz, options)
        if log is None:
            result = result_of(shown, run, campaign, "fuzz")
        else:
            result = result_of(FuzzRecording(shown, log, options), run, campaign, "fuzz")
        code = deliver(output, result, result.exit_code)
        concluded(log, result, code)
        print_result(text, result)
        return code
