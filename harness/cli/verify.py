"""`verify`: a campaign over a subject."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from harness import inputs
from harness.cli.launched import ranks_given, start_pool
from harness.cli.options import (
    EXIT_CODES,
    backend_options,
    config_option,
    events_option,
    json_option,
    seed_option,
    stall_option,
    subject_options,
    timeout_option,
    worlds_option,
)
from harness.cli.running import judge, parameters_of, subject_of
from harness.errors import UsageError
from harness.scenario.model import MAX_ELEMENTS
from harness.sim.choices import DEFAULT_ORDER, DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from harness.report.result import Result

DEFAULT_EXAMPLES = 300
PRESET_EXAMPLES = 3

VERIFY_EXAMPLES = """\b
Examples:
  zero2-harness verify
  zero2-harness verify --subject my_trainer.optim:Zero2 --world 1,2,3,4
  zero2-harness verify --subject ./zero2.py:Zero2 --subject-arg overlap=true --seconds 60
  zero2-harness verify --backend sim --world 2,3,4,8 --examples 1000
  zero2-harness verify --backend nccl --world 1,2,4
  zero2-harness verify --preset gpt2 --world 2 --json result.json
  torchrun --nproc-per-node=4 -m harness verify --examples 100
"""


@click.command(short_help="Run a campaign over a subject.", epilog=VERIFY_EXAMPLES + "\n" + EXIT_CODES)
@subject_options
@config_option
@worlds_option("1,2,3,4", "Numbers of ranks, in turn. World 2 alone proves nothing about order; include 3 and 4.")
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
@events_option
@timeout_option
@stall_option
def verify(
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    config_path: str | None,
    worlds: tuple[int, ...],
    backend: str,
    device: str | None,
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
    events_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Run a campaign of generated scenarios over a subject.

    Each scenario is run by real processes (with --backend sim: by the threads of one), compared at every stage with an
    unsharded trainer, and judged bitwise.
    The first failure is shrunk to its smallest form and saved as a case that `replay` runs again.
    Under torchrun, on one machine or several, each launched process looks after one rank, and the first one reports.
    """

    asked = click.get_current_context().get_parameter_source("worlds") is not ParameterSource.DEFAULT
    launch = ranks_given(backend, worlds if asked else None, "--world")
    worlds = worlds if launch is None else (launch.world,)
    if preset is not None and params is not None:
        raise UsageError("--preset and --params: give one of them")
    source = subject_of(subject, subject_args, config_path)
    parameters = parameters_of(preset, params)
    directory = inputs.prepare_report(report)
    inputs.check_apart(
        [("--json", json_path), ("--events", events_path)], [("--params", params), ("--config", config_path)]
    )
    output = None if json_path is None else inputs.JsonOutput(json_path)
    inputs.check_choices(backend, order, schedule)
    device = inputs.chosen_device(backend, device)
    inputs.check_backend(backend, worlds if launch is None else (launch.local_world,), device)
    from harness.recording import open_log

    log = open_log(events_path)

    # Hypothesis would leave a directory behind in the user's own; it works as well where it cannot write.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)
    # Only now: it loads Hypothesis, and a typing error should not wait for that.
    from harness.runner import CampaignOptions, Observer, run_campaign

    options = CampaignOptions(
        subject=source,
        worlds=worlds,
        backend=backend,
        device=device,
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

    def run(observer: Observer) -> Result:
        if launch is None:
            return run_campaign(options, observer)
        with start_pool(launch, backend, device) as pool:
            return run_campaign(options, observer, pool)

    return judge(
        run,
        options,
        output,
        first=f"seed {options.seed}",
        log=log,
        campaign=True,
    )
