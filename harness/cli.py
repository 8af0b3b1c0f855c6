"""The command line: ``python -m harness VERB``, installed as ``zero2-harness VERB``.

This process only parses, waits and reports: it imports neither torch nor a subject. Whatever goes wrong ends in one
line on stderr and one of five exit codes, never in a traceback on the terminal.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

import harness
from harness import ending, inputs
from harness.capacity import check_ranks, worker_processes
from harness.errors import UsageError, one_line
from harness.report import result as results
from harness.report.console import ProgressReport, TextConsole, describe, listing_lines, print_result
from harness.report.result import Examples, Result
from harness.scenario.model import MAX_ELEMENTS, Parameter
from harness.sim.choices import Schedule, SumOrder

if TYPE_CHECKING:
    from harness.runner import CampaignOptions
    from harness.scenario.codec import SubjectReference
    from harness.scenario.model import System
    from harness.subjects.source import Scalar, SubjectSource

T = TypeVar("T")

DEFAULT_SUBJECT = "zero2"
DEFAULT_EXAMPLES = 300
PRESET_EXAMPLES = 3
DEFAULT_MINUTES = 10.0
DEFAULT_PLANT_SECONDS = 20.0

EXIT_CODES = """\b
Exit codes:
  0    the properties hold
  1    violated: the failure is printed, its case saved, its replay command is the last line
  2    bad usage or bad input: one line says what
  3    unknown: the harness could not decide, and says why
  130  interrupted: the partial result is written
"""

VERIFY_EXAMPLES = """\b
Examples:
  zero2-harness verify
  zero2-harness verify --subject my_trainer.optim:Zero2 --world 1,2,3,4
  zero2-harness verify --subject ./zero2.py:Zero2 --subject-arg overlap=true --seconds 60
  zero2-harness verify --backend sim --world 2,3,4,8 --examples 1000
  zero2-harness verify --preset gpt2 --world 2 --json result.json
"""

REPLAY_EXAMPLES = """\b
Examples:
  zero2-harness replay zero2-harness-cases/case.json
  zero2-harness replay zero2-harness-cases/case.json --subject ./fixed.py:Zero2
"""

TRAIN_EXAMPLES = """\b
Examples:
  zero2-harness train
  zero2-harness train --world 2 --steps 200 --text book.txt --json train.json
  zero2-harness train --optimizer muon --world 4
"""

STRATEGIES_EXAMPLES = """\b
Examples:
  zero2-harness strategies
  zero2-harness strategies --world 2,4 --markdown > table.md
"""

DOCTOR_EXAMPLES = """\b
Examples:
  zero2-harness doctor
  zero2-harness doctor --world 3 --json doctor.json
"""

DOCTOR_EXIT_CODES = """\b
Exit codes:
  0    ok: no problem was found, and all that verdicts rest on was measured
  2    bad usage: one line says what
  3    problem, or unknown: verdicts on this machine cannot be trusted, and the last lines say why
  130  interrupted: the findings so far are written
"""

BENCH_EXAMPLES = """\b
Examples:
  zero2-harness bench
  zero2-harness bench --world 2,4 --examples 40 --json bench.json
  zero2-harness bench muon
"""

BENCH_MUON_EXAMPLES = """\b
Examples:
  zero2-harness bench muon
  zero2-harness bench muon --preset tiny-gpt --world 2,3 --json muon.json
"""

BENCH_EXIT_CODES = """\b
Exit codes:
  0    measured, whatever the ratio
  1    the subject failed: what its scenarios cost says nothing
  2    bad usage: one line says what
  3    unknown: it could not be measured, and why
  130  interrupted: what was measured is written
"""

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

FUZZ_EXAMPLES = """\b
Examples:
  zero2-harness fuzz --minutes 10
  zero2-harness fuzz --subject ./zero2.py:Zero2 --minutes 480 --keep-going
  zero2-harness fuzz --examples 2000 --seed 7 --json fuzz.json
  zero2-harness fuzz --minutes 10 --merge /mnt/other/.zero2-fuzz/zero2-1a2b3c4d
"""

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

LIST_EXAMPLES = """\b
Examples:
  zero2-harness list
  zero2-harness list --json -
  zero2-harness list --plan
  zero2-harness list --plan --preset llama-3.2-1b --world 16,32
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (default: ``sys.argv``) and return its exit code. Never raises, never exits."""
    with ending.interruptible(), ending.unbreakable_streams():
        try:
            return _run(sys.argv[1:] if args is None else args)
        except KeyboardInterrupt:
            return _complain("interrupted", results.EXIT_INTERRUPTED)


def _run(args: Sequence[str]) -> int:
    program = "python -m harness" if Path(sys.argv[0]).name == "__main__.py" else "zero2-harness"
    try:
        # Not cli.main(): it would answer a broken pipe anywhere with exit code 1.
        with cli.make_context(program, list(args)) as context:
            code = cli.invoke(context)
            return code if isinstance(code, int) else results.EXIT_HOLDS
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        at_fault = getattr(error, "ctx", None)
        hint = "" if at_fault is None else f"; try '{at_fault.command_path} --help'"
        return _complain(f"error: {error.format_message().rstrip('.')}{hint}", results.EXIT_USAGE)
    except UsageError as error:
        return _complain(f"error: {error}", results.EXIT_USAGE)
    except Exception as error:  # noqa: BLE001  (the last resort: an internal error must not look like a violation)
        return _complain(f"error: {ending.internal_error(error)}", results.EXIT_UNKNOWN)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog=EXIT_CODES,
)
@click.version_option(harness.__version__, prog_name="zero2-harness", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Prove a sharded optimizer equal to the unsharded trainer, bit for bit.

    Runs the sharded system on several processes beside an unsharded reference, over generated scenarios, and compares
    every stage of every step. Each verb has its own --help.
    """
    if context.invoked_subcommand is None:
        raise click.UsageError(f"no verb given, expected one of: {', '.join(cli.commands)}.", context)
    inputs.check_current_directory()


def _subject_options(command: Callable[..., int]) -> Callable[..., int]:
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


def _backend_options(command: Callable[..., int]) -> Callable[..., int]:
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


_config_option = click.option(
    "--config",
    "config_path",
    metavar="FILE",
    help="Of a distribution strategy: a JSON object, handed to it as it is. With --subject strategy it is what "
    "zero2core.build_strategy is given; a class of your own gets it as its first argument.",
)
_json_option = click.option(
    "--json",
    "json_path",
    metavar="FILE|-",
    help="Write the result as JSON; with -, stdout holds the JSON alone and all else goes to stderr.",
)
_timeout_option = click.option(
    "--timeout",
    type=float,
    callback=inputs.seconds,
    metavar="S",
    help="Seconds one scenario may take in all before it counts as hung (default: 30, more by its size and the load).",
)
_stall_option = click.option(
    "--stall",
    type=float,
    callback=inputs.seconds,
    metavar="S",
    help="Seconds without progress on any rank (a collective, a call of the class, code it has not run yet), waiting "
    "or computing, before a scenario counts as hung (default: 5 and 6, and more by its size).",
)
_seed_option = click.option(
    "--seed",
    type=int,
    callback=inputs.whole(0),
    metavar="N",
    help="Repeat a campaign (default: random, printed first).",
)


@cli.command(short_help="Run a campaign over a subject.", epilog=VERIFY_EXAMPLES + "\n" + EXIT_CODES)
@_subject_options
@_config_option
@click.option(
    "--world",
    "worlds",
    default="1,2,3,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks, in turn. World 2 alone proves nothing about order; include 3 and 4.",
)
@_backend_options
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
@_seed_option
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
@_json_option
@_timeout_option
@_stall_option
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
    source = _subject(subject, subject_args, config_path)
    parameters = _parameters(preset, params)
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
    return _judge(
        lambda observer: run_campaign(options, observer),
        options,
        output,
        first=f"seed {options.seed}",
        campaign=True,
    )


@cli.command(short_help="Run one saved case again.", epilog=REPLAY_EXAMPLES + "\n" + EXIT_CODES)
@click.argument("file", metavar="FILE")
@_subject_options
@_config_option
@_backend_options
@_json_option
@_timeout_option
@_stall_option
def replay(
    *,
    file: str,
    subject: str | None,
    subject_args: tuple[str, ...],
    config_path: str | None,
    backend: str,
    order: str | None,
    schedule: str | None,
    json_path: str | None,
    timeout: float | None,
    stall: float | None,
) -> int:
    """Run one saved case again, on the subject it names or on another (--subject).

    It is run five times (a hang once), since a violation that comes and goes is one too.
    """
    from harness.scenario import codec

    case = codec.load(Path(file))
    source = _case_subject(file, case.subject, subject, inputs.subject_arguments(subject_args))
    source = source if config_path is None else _configured(source, config_path)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    inputs.check_choices(backend, order, schedule)
    inputs.check_backend(backend, (case.scenario.world,))

    from harness.runner import DEFAULT_ORDER, DEFAULT_SCHEDULE, CampaignOptions, replay_case

    options = CampaignOptions(
        subject=source,
        worlds=(case.scenario.world,),
        backend=backend,
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
    return _judge(
        lambda observer: replay_case(case, Path(file), options, observer),
        options,
        output,
        first=one_line(f"replaying {file} on {options.subject.given}: {describe(case.scenario)}"),
        campaign=False,
    )


@cli.command(
    short_help="Train a small language model, sharded and unsharded.", epilog=TRAIN_EXAMPLES + "\n" + EXIT_CODES
)
@_subject_options
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
@_json_option
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
    with _streams(output) as (out, errors):
        TextConsole(out).say(f"seed {seed}")
        with show.TrainProgress(errors, steps) as progress:
            result = run_training(options, progress)
        code = _deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code


@cli.command(short_help="Measure what this machine promises.", epilog=DOCTOR_EXAMPLES + "\n" + DOCTOR_EXIT_CODES)
@click.option(
    "--world",
    "worlds",
    default="2,3,4",
    show_default=True,
    callback=inputs.doctor_worlds,
    metavar="W[,W...]",
    help="Numbers of ranks at which collectives are examined.",
)
@click.option("--backend", type=click.Choice(["gloo"]), default="gloo", show_default=True, help="Whose collectives.")
@_json_option
def doctor(*, worlds: tuple[int, ...], backend: str, json_path: str | None) -> int:
    """Measure what this machine promises of what the harness relies on.

    Versions, cores, memory, loopback; the order in which sums are added, and how well the harness's rule predicts it;
    AVG; AdamW on a flat vector against its pieces; rounding, nan, subnormals; strided views; repeats.

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
    check_ranks(worlds)
    with _streams(output) as (out, _):
        with show.FindingsReport(out) as report:
            result = run_doctor(worlds, report)
        code = _deliver(output, result, result.exit_code)
        show.print_result(out, result)
        return code


@cli.group(
    short_help="Measure what a scenario costs, or a step of Muon.",
    invoke_without_command=True,
    epilog=BENCH_EXAMPLES + "\n" + BENCH_EXIT_CODES,
)
@_subject_options
@click.option(
    "--world",
    "worlds",
    default="2,3,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks to measure at.",
)
@click.option(
    "--examples",
    type=int,
    callback=inputs.whole(1),
    default=60,
    show_default=True,
    metavar="N",
    help="Scenarios at each world; each is run several times.",
)
@_seed_option
@_json_option
@click.pass_context
def bench(
    context: click.Context,
    *,
    subject: str | None,
    subject_args: tuple[str, ...],
    worlds: tuple[int, ...],
    examples: int,
    seed: int | None,
    json_path: str | None,
) -> int:
    """Measure what a scenario costs, as a ratio to its own calls run bare.

    Bare: the same constructor, collects, reductions, norms, clips, optimizer steps, gathers and discards on the same
    warm ranks, with gradients that lie ready and nothing observed; the longest of the ranks' times, begun together.
    Full: the parent's time for one scenario of a campaign, from sending it until it is judged and the next one, drawn
    beside it, is there; sending tasks is so part of full, not of bare. Not in it: the start of the ranks, and the runs
    that a campaign repeats now and then. Full and bare runs take turns; of each scenario's runs the median counts.

    A high ratio is no failure: the exit code says whether it could be measured.

    `bench muon` measures another thing, and has options of its own.
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options of `bench {context.invoked_subcommand}` go after its name.", context)
        return results.EXIT_HOLDS
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)
    from harness.bench import show
    from harness.bench.campaign import BenchOptions, run_bench
    from harness.subjects.source import parse

    source = parse(DEFAULT_SUBJECT if subject is None else subject, inputs.subject_arguments(subject_args))
    output = None if json_path is None else inputs.JsonOutput(json_path)
    check_ranks(worlds)
    options = BenchOptions(
        subject=source, worlds=worlds, examples=examples, seed=inputs.random_seed() if seed is None else seed
    )
    with _streams(output) as (out, errors):
        TextConsole(out).say(f"seed {options.seed}")
        result = run_bench(options, TextConsole(errors).say)
        code = _deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code


@bench.command("muon", epilog=BENCH_MUON_EXAMPLES + "\n" + BENCH_EXIT_CODES)
@click.option(
    "--world",
    "worlds",
    default="1,2,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks to measure at.",
)
@click.option(
    "--preset", default="gpt2", show_default=True, metavar="NAME", help="Whose parameters; `list` shows them."
)
@click.option(
    "--steps",
    type=int,
    callback=inputs.whole(1, 1000),
    default=2,
    show_default=True,
    metavar="N",
    help="Steps that count, of each system at each world, after one that does not.",
)
@click.option("--seed", type=int, callback=inputs.whole(0), default=0, show_default=True, metavar="N")
@_json_option
def bench_muon(*, worlds: tuple[int, ...], preset: str, steps: int, seed: int, json_path: str | None) -> int:
    """Measure a step of MuonShardingOptimizer, as ratios to unsharded Muon and beside the original owner rule.

    Unsharded: gradients averaged by all-reduces in fp32, and every rank updates everything. Every 2-D matrix but
    embeddings and the output head is Muon's, uncut, with the default settings (five iterations in bf16). All start
    from the same weights and gradients, which lie ready, and must end with the same bits. A step goes from the
    gradients to new weights on every rank.

    GPT-2 124M at worlds 1, 2 and 4 takes minutes on two cores, and about 14 GiB of memory.
    """
    from harness.bench.muon import show
    from harness.bench.muon.campaign import MuonBenchOptions, run_muon_bench

    options = MuonBenchOptions(preset=preset, worlds=worlds, steps=steps, seed=seed)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    with _streams(output) as (out, errors):
        result = run_muon_bench(options, TextConsole(errors).say)
        code = _deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code


@cli.command(
    short_help="Check the harness itself: faults among many scenarios.", epilog=SOAK_EXAMPLES + "\n" + SOAK_EXIT_CODES
)
@_subject_options
@click.option(
    "--world",
    "worlds",
    default="2,3",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks, in turn.",
)
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
@_seed_option
@click.option("--report", metavar="DIR", help=f"Where a failing case is saved (default: ./{inputs.DEFAULT_REPORT}/).")
@_json_option
@_timeout_option
@_stall_option
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
    with _streams(output) as (out, errors):
        TextConsole(out).say(f"seed {options.seed}")
        with ProgressReport(errors) as progress:
            progress.started(options)
            result = run_soak(options, progress)
        code = _deliver(output, result, result.exit_code)
        show.print_result(out, result)
        return code


@cli.command(short_help="Search on and on, with several processes; resumes.", epilog=FUZZ_EXAMPLES + "\n" + EXIT_CODES)
@_subject_options
@_config_option
@click.option(
    "--world",
    "worlds",
    default="1,2,3,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks, in turn.",
)
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
@_json_option
@_timeout_option
@_stall_option
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

    source = _subject(subject, subject_args, config_path)
    if seed is not None and hypothesis_seed is not None and seed != hypothesis_seed:
        raise UsageError(f"--seed {seed} and --hypothesis-seed {hypothesis_seed}: they mean the same; give one of them")
    asked = hypothesis_seed if seed is None else seed
    inputs.check_backend(backend, worlds)
    num_workers = worker_processes(backend, worlds, workers)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    cases = None if report is None else inputs.prepare_report(report)

    from harness.fuzz import show
    from harness.fuzz.campaign import FuzzOptions, run_fuzz
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
    with _streams(output) as (text, errors):
        result = _result_of(show.FuzzProgress(errors), functools.partial(run_fuzz, options), campaign)
        code = _deliver(output, result, result.exit_code)
        print_result(text, result)
        return code


@cli.command(
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
@_seed_option
@click.option("--report", metavar="DIR", help=f"Where failing cases are saved (default: ./{inputs.DEFAULT_REPORT}/).")
@_json_option
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
) -> int:
    """Score the harness: a campaign over every planted bug, and over classes that are right in another way.

    Each plant stands for one or more public bugs: the same mechanism where such a class can have it, else the same kind
    (its label says which). Its campaign is an ordinary one: the same scenarios as of `verify`, from a seed of its own;
    whatever is known of the plant is used only to judge what was told: property and stage, symptom, rank and parameter.
    A control is a right class that does something another way:
    at most 100 scenarios of it, and a violation is a false alarm. `replay` runs any case that was saved.
    """
    if shown or listed:
        if plants or json_path is not None:
            raise UsageError("--show and --list run nothing: give neither --plant nor --json (`list --json` has all)")
        return _museum_lookup(shown, listed, system)
    from harness.museum import show
    from harness.museum.campaign import WORLDS, MuseumOptions, run_museum
    from harness.museum.selection import select

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
    output = None if json_path is None else inputs.JsonOutput(json_path)
    with _streams(output) as (out, errors):
        TextConsole(out).say(f"seed {options.seed}")
        if chosen.simulated_only:
            TextConsole(errors).say(show.left_to_sim(len(chosen.simulated_only)))
        with show.MuseumProgress(errors) as progress:
            result = run_museum(options, progress)
        code = _deliver(output, result, result.exit_code)
        show.print_result(out, result)
        return code


def _museum_lookup(shown: Sequence[str], listed: bool, system: System | None) -> int:
    from harness.museum import lookup
    from harness.museum.selection import find

    exhibits = {each.id: each for name in shown for each in find("--show", name)}
    blocks = [lookup.exhibit_lines(each) for each in exhibits.values()]
    if listed:
        blocks.append(lookup.listing_lines(system))
    with _streams(None) as (out, _):
        TextConsole(out).say("\n\n".join("\n".join(lines) for lines in blocks))
    return results.EXIT_HOLDS


@cli.command(
    short_help="Every cell of strategy x reduction x accumulation x clipping.",
    epilog=STRATEGIES_EXAMPLES + "\n" + EXIT_CODES,
)
@click.option(
    "--world",
    "worlds",
    default="2,3,4",
    show_default=True,
    callback=inputs.worlds,
    metavar="W[,W...]",
    help="Numbers of ranks at which each cell is tried, on every mesh that its strategy has there.",
)
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@_seed_option
@_json_option
def strategies(*, worlds: tuple[int, ...], markdown: bool, seed: int | None, json_path: str | None) -> int:
    """Print which equality each distribution strategy keeps, as a table that was measured here and now.

    Each cell is a run of three steps on gloo ranks, held against one process that sees the whole batch: gradients, the
    joint norm, moments and weights bit for bit where sums are exact; and, in a second table, where sums round. The same
    comparisons as of `verify --subject NAME`, on one scenario for each cell, world and mesh.
    """
    from harness.cells import show
    from harness.cells.campaign import run_cells

    inputs.check_backend("gloo", worlds)
    output = None if json_path is None else inputs.JsonOutput(json_path)
    chosen = inputs.random_seed() if seed is None else seed
    with _streams(output) as (out, errors):
        TextConsole(errors if markdown else out).say(f"seed {chosen}")
        result = run_cells(worlds, chosen, show.CellsProgress(errors))
        code = _deliver(output, result, result.exit_code)
        show.print_result(out, result, markdown=markdown)
        return code


@cli.command(
    "list", short_help="Show subjects, presets, properties, situations.", epilog=LIST_EXAMPLES + "\n" + EXIT_CODES
)
@click.option("--plan", is_flag=True, help="How evenly Muon's matrices are dealt out to ranks, by each owner rule.")
@click.option("--preset", "presets", multiple=True, metavar="NAME", help="With --plan: of this model; repeatable.")
@click.option(
    "--world", "worlds", callback=inputs.some_worlds, metavar="W[,W...]", help="With --plan: for so many ranks."
)
@_json_option
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
    with _streams(output) as (text, _):
        if output is None:
            TextConsole(text).say("\n".join(listing_lines(shown)))
        return _deliver(output, listing, results.EXIT_HOLDS)


def _list_plan(presets: Sequence[str], worlds: Sequence[int] | None, json_path: str | None) -> int:
    from harness.balance import owners

    output = None if json_path is None else inputs.JsonOutput(json_path)
    try:
        answer = owners.ask(presets or owners.PRESETS, worlds or owners.WORLDS)
    except owners.UnansweredError as error:
        return _complain(f"unknown: {error}", results.EXIT_UNKNOWN)
    with _streams(output) as (text, _):
        if output is None:
            TextConsole(text).say("\n".join(owners.lines(answer)))
        return _deliver(output, {"muon": owners.MUON, "balances": answer.balances}, results.EXIT_HOLDS)


def _judge(
    run: Callable[[ProgressReport], Result],
    options: CampaignOptions,
    output: inputs.JsonOutput | None,
    *,
    first: str,
    campaign: bool,
) -> int:
    """Run a campaign, or the replay of one case: show progress, write the result and print it; the exit code."""
    with _streams(output) as (text, errors):
        TextConsole(text).say(first)
        result = _result_of(ProgressReport(errors), run, options)
        code = _deliver(output, result, result.exit_code)
        print_result(text, result, campaign=campaign)
        return code


def _result_of(shown: AbstractContextManager[T], run: Callable[[T], Result], options: CampaignOptions) -> Result:
    """What ``run`` gives, with its progress shown; whatever happens there, there is a result."""
    began = time.monotonic()
    try:
        with shown as progress:
            return run(progress)
    except UsageError:
        raise
    except KeyboardInterrupt:
        return _undecided(options, "interrupted before any result", time.monotonic() - began, interrupted=True)
    except Exception as error:  # noqa: BLE001  (an internal error is "unknown", with a result like any other)
        return _undecided(options, ending.internal_error(error), time.monotonic() - began)


@contextmanager
def _streams(output: inputs.JsonOutput | None) -> Iterator[tuple[IO[str], IO[str]]]:
    """Where results and where progress and complaints go, as text; both stderr when stdout is for the JSON."""
    with nullcontext() if output is None else output.reserved():
        yield (sys.stderr if output is not None and output.to_stdout else sys.stdout), sys.stderr


def _deliver(output: inputs.JsonOutput | None, result: object, code: int) -> int:
    """Write the JSON; the exit code, which a lost result turns from "holds" into "unknown"."""
    if output is not None:
        try:
            output.write(results.to_json(result))
        except OSError as error:
            code = code or results.EXIT_UNKNOWN
            _complain(f"error: --json {output.given}: the result could not be written: {error.strerror}", code)
    return code


def _undecided(options: CampaignOptions, reason: str, seconds: float, *, interrupted: bool = False) -> Result:
    return Result(
        verdict="unknown",
        subject=options.subject.given,
        backend=options.backend,
        order=options.order if options.backend == "sim" else None,
        schedule=options.schedule if options.backend == "sim" else None,
        worlds=options.worlds,
        seed=options.seed,
        examples=Examples(run=0),
        seconds=seconds,
        examples_per_second=0.0,
        versions=results.versions(),
        reason=reason,
        interrupted=interrupted,
    )


def _parameters(preset: str | None, params: str | None) -> tuple[Parameter, ...] | None:
    if params is not None:
        from harness.scenario.codec import load_parameters

        return load_parameters(Path(params))
    if preset is not None:
        from harness.scenario import presets

        return presets.parameters(preset)
    return None


def _subject(subject: str | None, subject_args: Sequence[str], config_path: str | None) -> SubjectSource:
    """The subject that the command line names."""
    from harness.subjects.builtin import CONFIGURED
    from harness.subjects.source import parse

    source = parse(DEFAULT_SUBJECT if subject is None else subject, inputs.subject_arguments(subject_args))
    if config_path is not None:
        return _configured(source, config_path)
    if source.absolute == CONFIGURED:
        raise UsageError(f"--subject {CONFIGURED}: give its configuration with --config FILE.json")
    return source


def _configured(source: SubjectSource, config_path: str) -> SubjectSource:
    from harness.scenario.codec import load_configuration
    from harness.subjects.builtin import CONFIGURED
    from harness.subjects.source import with_config
    from harness.subjects.strategy_offers import summary_of

    config = load_configuration(Path(config_path))
    configured = with_config(source, config)
    if source.absolute == CONFIGURED:
        TextConsole(sys.stderr).say(f"strategy: {summary_of(config)}")
    return configured


def _case_subject(
    file: str, named: SubjectReference | None, subject: str | None, args: dict[str, Scalar]
) -> SubjectSource:
    """The subject a case names, unless the command line names another; a case without one means the default.

    Another one is given the case's configuration, if it takes any.
    """
    from harness.subjects.source import from_case, parse, takes_config, with_config

    if subject is not None or named is None:
        source = parse(DEFAULT_SUBJECT if subject is None else subject, args)
        config = None if named is None else named.config
        return with_config(source, config) if config is not None and takes_config(source) else source
    try:
        return from_case(named.given, named.absolute, {**named.args, **args}, named.config)
    except UsageError as error:
        raise UsageError(f"{file}: the case's own subject: {error}; give --subject to say what to run") from None


def _complain(message: str, code: int) -> int:
    """One line on stderr; returns ``code``."""
    TextConsole(sys.stderr).say(" ".join(message.splitlines()))
    return code
