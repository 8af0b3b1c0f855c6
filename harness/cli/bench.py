"""`bench` and `bench muon`: what a scenario, or a step of Muon, costs."""

from __future__ import annotations

import os

import click
from click.core import ParameterSource

from harness import inputs
from harness.capacity import check_ranks
from harness.cli.options import DEFAULT_SUBJECT, json_option, seed_option, subject_options, worlds_option
from harness.cli.running import deliver, streams
from harness.report import result as results
from harness.report.console import TextConsole

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


@click.group(
    short_help="Measure what a scenario costs, or a step of Muon.",
    invoke_without_command=True,
    epilog=BENCH_EXAMPLES + "\n" + BENCH_EXIT_CODES,
)
@subject_options
@worlds_option("2,3,4", "Numbers of ranks to measure at.")
@click.option(
    "--examples",
    type=int,
    callback=inputs.whole(1),
    default=60,
    show_default=True,
    metavar="N",
    help="Scenarios at each world; each is run several times.",
)
@seed_option
@json_option
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
    with streams(output) as (out, errors):
        TextConsole(out).say(f"seed {options.seed}")
        result = run_bench(options, TextConsole(errors).say)
        code = deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code


@bench.command("muon", epilog=BENCH_MUON_EXAMPLES + "\n" + BENCH_EXIT_CODES)
@worlds_option("1,2,4", "Numbers of ranks to measure at.")
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
@json_option
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
    with streams(output) as (out, errors):
        result = run_muon_bench(options, TextConsole(errors).say)
        code = deliver(output, result, results.exit_code(result.verdict, interrupted=result.interrupted))
        show.print_result(out, result)
        return code
