"""`train`: a small language model, sharded and unsharded."""

from __future__ import annotations

from pathlib import Path

import click

from harness import inputs
from harness.capacity import check_ranks
from harness.cli.options import DEFAULT_SUBJECT, EXIT_CODES, json_option, subject_options
from harness.cli.running import deliver, streams
from harness.errors import UsageError
from harness.report import result as results
from harness.report.console import TextConsole

TRAIN_EXAMPLES = """\b
Examples:
  zero2-harness train
  zero2-harness train --world 2 --steps 200 --text book.txt --json train.json
  zero2-harness train --optimizer muon --world 4
"""


@click.command(
    short_help="Train a small language model, sharded and unsharded.", epilog=TRAIN_EXAMPLES + "\n" + EXIT_CODES
)
@subject_options
@click.option(
    "--optimizer",
    type=click.Choice(["zero2", "muon"]),
    help="Which of our own, in place of --subject: AdamW sharded by ZeroMaster (the default), or Muon for the matrices "
    "of the model's blocks (AdamW for all else) by MuonShardingOptimizer.",
)
@click.option(
    "--world",
    type=int,
    callback=inputs.whole(1, 64),
    default=2,
    show_default=True,
    metavar="W",
    help="Number of ranks. Gradients round; from three ranks on the unsharded trainer adds in the backend's own order.",
)
@click.option("--steps", type=int, callback=inputs.whole(1, 1_000_000), default=60, show_default=True, metavar="N")
@click.option("--text", metavar="FILE", help="What to train on (default: the text of Python's own help).")
@click.option("--seed", type=int, callback=inputs.whole(0), default=0, show_default=True, metavar="N")
@json_option
def train(
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    optimizer: str | None,
    world: int,
    steps: int,
    text: str | None,
    seed: int,
    json_path: str | None,
) -> int:
    """Train a small language model on real text, sharded and unsharded side by side.

    The weights must be equal bit for bit after every step.
    """
    if optimizer is not None and subject is not None:
        raise UsageError(f"--optimizer {optimizer} and --subject {subject} both say what to train with: give one")
    from harness.subjects.source import parse
    from harness.train import show
    from harness.train.campaign import TrainOptions, run_training
    from harness.train.text import load_text

    options = TrainOptions(
        subject=parse(subject or optimizer or DEFAULT_SUBJECT, inputs.subject_arguments(subject_args)),
        world=world,
        steps=steps,
        seed=seed,
        text=None if text is None else Path(text),
    )
    load_text(options.text)  # only to refuse it before anything is printed
    output = None if json_path is None else inputs.JsonOutput(json_path)
    check_ranks((world,))
    with streams(output) as (out, errors):
        TextConsole(out).say(f"seed {seed}")
        with show.TrainProgress(errors, steps) as progress:
            result = run_training(options, progress)
        code = deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code
