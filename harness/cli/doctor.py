"""`doctor`: what this machine promises."""

from __future__ import annotations

import click

from harness import inputs
from harness.cli.options import json_option
from harness.cli.running import deliver, streams
from harness.launch.process import DEVICES

DOCTOR_EXAMPLES = """\b
Examples:
  zero2-harness doctor
  zero2-harness doctor --world 3 --json doctor.json
  zero2-harness doctor --device cuda
  zero2-harness doctor --backend nccl --world 2,4
"""

DOCTOR_EXIT_CODES = """\b
Exit codes:
  0    ok: no problem was found, and all that verdicts rest on was measured
  2    bad usage: one line says what
  3    problem, or unknown: verdicts on this machine cannot be trusted, and the last lines say why
  130  interrupted: the findings so far are written
"""


@click.command(short_help="Measure what this machine promises.", epilog=DOCTOR_EXAMPLES + "\n" + DOCTOR_EXIT_CODES)
@click.option(
    "--world",
    "worlds",
    default="2,3,4",
    show_default=True,
    callback=inputs.doctor_worlds,
    metavar="W[,W...]",
    help="Numbers of ranks at which collectives are examined.",
)
@click.option(
    "--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True, help="Whose collectives."
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Where the ranks compute (default: cuda with --backend nccl, else cpu). With gloo, cuda needs one GPU.",
)
@json_option
def doctor(*, worlds: tuple[int, ...], backend: str, device: str | None, json_path: str | None) -> int:
    """Measure what this machine promises of what the harness relies on.

    Versions, cores, memory, loopback; the order in which sums are added, and how well the harness's rule predicts it;
    AVG; AdamW on a flat vector against its pieces, and on a GPU against the CPU; rounding, nan, subnormals; strided
    views; repeats.

    \b
    Each finding says what was measured, what that means for you, and one of:
      ok       as the harness relies on
      note     worth knowing; the harness copes
      problem  verdicts on this machine cannot be trusted, or the harness will fail
      unknown  could not be measured, and why
    The verdict over all is problem if a finding is; else unknown if one that verdicts rest on is; else ok.
    """
    from harness.doctor import show
    from harness.doctor.examination import run_doctor

    output = None if json_path is None else inputs.JsonOutput(json_path)
    device = inputs.chosen_device(backend, device)
    inputs.check_backend(backend, worlds, device)
    with streams(output) as (out, _):
        with show.FindingsReport(out) as report:
            result = run_doctor(worlds, report, backend, device)
        code = deliver(output, result, result.exit_code)
        show.print_result(out, result)
        return code
