"""`verify`: a campaign over a subject."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from harness import inputs
from harness.cli.options import (
    EXIT_CODES,
    backend_options,
    config_option,
    json_option,
    seed_option,
    stall_option,
    subject_options,
    timeout_option,
)
from harness.cli.running import judge, parameters_of, subject_of
from harness.errors import UsageError
from harness.scenario.model import MAX_ELEMENTS

if TYPE_CHECKING:
    pass

DEFAULT_EXAMPLES = 300
PRESET_EXAMPLES = 3

VERIFY_EXAMPLES = """\b
Examples:
  zero2-harness verify
  zero2-harness verify --subject my_trainer.optim:Zero2 --world 1,2,3,4
  zero2-harness verify --subject ./zero2.py:Zero2 --subject-arg overlap=true --seconds 60
  zero2-harness verify --backend sim --world 2,3,4,8 --examples 1000
  zero2-harness verify --preset gpt2 --world 2 --json result.json
"""


@click.command(short_help="Run a campaign over a subject.", epilog=VERIFY_EXAMPLES + "\n" + EXIT_CODES)
@subject_options
@config_option
@click.option(
    "--world",
    "worlds",
    default="1,2,3,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks, in turn. World 2 alone proves nothing about order; include 3 and 4.",
)
@backend_options
@click.option(
    "--examples",
    type=int,
    callback=inputs.whole(1),
    metavar="N",
    help=f"Scenarios to run (default: {DEFAULT_EXAMPLES}; with --preset or --params {PRESET_EXAMPLES} at each world).",
)
@click.option(
    "--seconds", type=float, callback=inputs.seconds, metavar="S", help="Stop after this long (default: no bound)."
)
@seed_option
@click.option("--preset", metavar="NAME", help="The parameters of a real model; `list` shows them.")
@click.option(
    "--params",
    metavar="FILE",
    help='Your own model\'s parameters: a JSON list [{"name": "w", "shape": [4, 8]}, ...].',
)
@click.option(
    "--bucket",
    type=int,
    callback=inputs.whole(1, MAX_ELEMENTS),
    metavar="N",
    help="Bucket size, of Muon that of a fused buffer, in elements (default: varied; about five buckets, at most "
    "2**25, with --preset or --params).",
)
@click.option("--report", metavar="DIR", help=f"Where failing cases are saved (default: ./{inputs.DEFAULT_REPORT}/).")
@json_option
@timeout_option
@stall_option
def verify(
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    config_path: str | None,
    worlds: tuple[int, ...],
    backend: str,
    order: str | None,
    schedule: str | None,
    examples: int | None,
    seconds: float | None,
    seed: int | None,
    preset: str | None,
    params: str | None,
    bucket: int | None,
    report: str | None,
    json_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Run a campaign of generated scenarios over a subject.

    Each scenario is run by real processes (with --backend sim: by the threads of one), compared at every stage with an
    unsharded trainer, and judged bitwise.
    The first failure is shrunk to its smallest form and saved as a case that `replay` runs again.
    """

    if preset is not None and params is not None:
        raise UsageError("--preset and --params: give one of them")
    source = subject_of(subject, subject_args, config_path)
    parameters = parameters_of(preset, params)
    directory = inputs.prepare_report(report)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    inputs.check_choices(backend, order, schedule)
    inputs.check_backend(backend, worlds)

    # Hypothesis would leave a directory behind in the user's own; it works as well where it cannot write.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)
    # Only now: it loads Hypothesis, and a typing error should not wait for that.
    from harness.runner import DEFAULT_ORDER, DEFAULT_SCHEDULE, CampaignOptions, run_campaign

    options = CampaignOptions(
        subject=source,
        worlds=worlds,
        backend=backend,
        seed=inputs.random_seed() if seed is None else seed,
        examples=examples or (DEFAULT_EXAMPLES if parameters is None else PRESET_EXAMPLES),
        seconds=seconds,
        bucket=bucket,
        parameters=parameters,
        report=directory,
        timeout_s=timeout,
        stall_s=stall,
        order=order or DEFAULT_ORDER,
        schedule=schedule or DEFAULT_SCHEDULE,
    )
    return judge(
        lambda observer: run_campaign(options, observer),
        options,
        output,
        first=f"seed {options.seed}",
        campaign=True,
    )
