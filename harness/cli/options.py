"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable

import click

from harness import inputs
from harness.launch.process import DEVICES
from harness.sim.choices import Schedule, SumOrder

DEFAULT_SUBJECT = "zero2"

EXIT_CODES = """\b
Exit codes:
  0    the properties hold
  1    violated: the failure is printed, its case saved, its replay command is the last line
  2    bad usage or bad input: one line says what
  3    unknown: the harness could not decide, and says why
  130  interrupted: the partial result is written
"""


def subject_options(command: Callable[..., int]) -> Callable[..., int]:
    """``--subject`` and ``--subject-arg``."""
    command = click.option(
        "--subject-arg",
        "subject_args",
        multiple=True,
        metavar="NAME=VALUE",
        help="A further keyword argument of the constructor; repeatable. VALUE is a JSON scalar, else text.",
    )(command)
    return click.option(
        "--subject",
        metavar="NAME|MODULE:CLASS|FILE.py:CLASS",
        help="The system under verification; `list` shows the built-in ones.",
    )(command)


def worlds_option(default: str, meaning: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """``--world``: numbers of ranks, each of which the machine can hold."""
    return click.option(
        "--world",
        "worlds",
        default=default,
        show_default=True,
        callback=inputs.worlds,
        metavar="W[,W...]",
        help=meaning,
    )


def backend_options(command: Callable[..., int]) -> Callable[..., int]:
    """``--backend``, and with it where tensors lie and how simulated worlds run."""
    command = click.option(
        "--device",
        type=click.Choice(DEVICES),
        help="Where the ranks keep their tensors (default: cuda with --backend nccl, else cpu). With gloo or sim, cuda "
        "needs one GPU, which ranks share; ranks on the cpu see none.",
    )(command)
    command = click.option(
        "--schedule",
        type=click.Choice([each.value for each in Schedule]),
        help="With --backend sim: which rank runs next, by the scenario's seed or in turn, and when asynchronous "
        "collectives happen (default: random).",
    )(command)
    command = click.option(
        "--order",
        type=click.Choice([each.value for each in SumOrder]),
        help="With --backend sim: in what order sums are added; ring is gloo's (default: ring).",
    )(command)
    return click.option(
        "--backend",
        type=click.Choice(["gloo", "nccl", "sim"]),
        default="gloo",
        show_default=True,
        help="gloo runs on any machine; nccl needs one GPU a rank; sim runs all ranks in one process, one at a time: "
        "fast, deterministic, and up to 256 of them.",
    )(command)


config_option = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help="Of a distribution strategy: a JSON object, handed to it as it is. With --subject strategy it is what "
    "zero2core.build_strategy is given; a class of your own gets it as its first argument.",
)
json_option = click.option(
    "--json",
    "json_path",
    metavar="FILE|-",
    help="Write the result as JSON; with -, stdout holds the JSON alone and all else goes to stderr.",
)
events_option = click.option(
    "--events",
    "events_path",
    metavar="FILE",
    help="Keep a log of the run, one JSON object a line, written as things happen; `report` renders it.",
)
timeout_option = click.option(
    "--timeout",
    type=float,
    callback=inputs.seconds,
    metavar="S",
    help="Seconds one scenario may take in all before it counts as hung (default: 30, more by its size and the load).",
)
stall_option = click.option(
    "--stall",
    type=float,
    callback=inputs.seconds,
    metavar="S",
    help="Seconds without progress on any rank (a collective, a call of the class, code it has not run yet), waiting "
    "or computing, before a scenario counts as hung (default: 5 and 6, and more by its size).",
)
seed_option = click.option(
    "--seed",
    type=int,
    callback=inputs.whole(0),
    metavar="N",
    help="Repeat a campaign (default: random, printed first).",
)
