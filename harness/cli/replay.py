"""`replay`: one saved case again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness import inputs
from harness.cli.launched import ranks_given, start_pool
from harness.cli.options import (
    EXIT_CODES,
    backend_options,
    config_option,
    events_option,
    json_option,
    stall_option,
    subject_options,
    timeout_option,
)
from harness.cli.running import case_subject, configured, judge
from harness.errors import one_line
from harness.report.console import describe
from harness.sim.choices import DEFAULT_ORDER, DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from harness.report.result import Result

REPLAY_EXAMPLES = """\b
Examples:
  zero2-harness replay zero2-harness-cases/case.json
  zero2-harness replay zero2-harness-cases/case.json --subject ./fixed.py:Zero2
  torchrun --nproc-per-node=3 -m harness replay zero2-harness-cases/case.json
"""


@click.command(short_help="Run one saved case again.", epilog=REPLAY_EXAMPLES + "\n" + EXIT_CODES)
@click.argument("file", metavar="FILE")
@subject_options
@config_option
@backend_options
@json_option
@events_option
@timeout_option
@stall_option
def replay(
    *,
    file: str,
    subject: str | None,
    subject_args: tuple[str, ...],
    config_path: str | None,
    backend: str,
    device: str | None,
    order: str | None,
    schedule: str | None,
    json_path: str | None,
    events_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Run one saved case again, on the subject it names or on another (--subject).

    It is run five times (a hang once), since a violation that comes and goes is one too.
    """
    from harness.scenario import codec

    case = codec.load(Path(file))
    source = case_subject(file, case.subject, subject, inputs.subject_arguments(subject_args))
    source = source if config_path is None else configured(source, config_path)
    inputs.check_apart(
        [("--json", json_path), ("--events", events_path)], [("the case", file), ("--config", config_path)]
    )
    output = None if json_path is None else inputs.JsonOutput(json_path)
    inputs.check_choices(backend, order, schedule)
    launch = ranks_given(backend, (case.scenario.world,), f"{file}, a case of world")
    device = inputs.chosen_device(backend, device)
    inputs.check_backend(backend, (case.scenario.world if launch is None else launch.local_world,), device)
    from harness.recording import open_log

    log = open_log(events_path)

    from harness.runner import CampaignOptions, Observer, replay_case

    options = CampaignOptions(
        subject=source,
        worlds=(case.scenario.world,),
        backend=backend,
        device=device,
        seed=case.scenario.seed,
        examples=1,
        seconds=None,
        bucket=None,
        parameters=None,
        report=inputs.DEFAULT_REPORT,
        timeout_s=timeout,
        stall_s=stall,
        order=order or DEFAULT_ORDER,
        schedule=schedule or DEFAULT_SCHEDULE,
    )

    def run(observer: Observer) -> Result:
        if launch is None:
            return replay_case(case, Path(file), options, observer)
        with start_pool(launch, backend, device) as pool:
            return replay_case(case, Path(file), options, observer, pool)

    return judge(
        run,
        options,
        output,
        first=one_line(f"replaying {file} on {options.subject.given}: {describe(case.scenario)}"),
        log=log,
        campaign=False,
    )
