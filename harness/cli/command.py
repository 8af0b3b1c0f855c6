"""The command line: ``python -m harness VERB``, installed as ``zero2-harness VERB``.

This process only parses, waits and reports: it imports neither torch nor a subject. Whatever goes wrong ends in one
line on stderr and one of five exit codes, never in a traceback on the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

import harness
from harness import ending, inputs
from harness.cli import launched
from harness.cli.bench import bench
from harness.cli.doctor import doctor
from harness.cli.fuzz import fuzz
from harness.cli.listing import list_
from harness.cli.museum import museum
from harness.cli.options import EXIT_CODES
from harness.cli.replay import replay
from harness.cli.report import report
from harness.cli.running import complain
from harness.cli.soak import soak
from harness.cli.strategies import strategies
from harness.cli.train import train
from harness.cli.verify import verify
from harness.errors import UsageError
from harness.launch import torchrun
from harness.report import result as results


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (default: ``sys.argv``) and return its exit code. Never raises, never exits."""
    with ending.interruptible(), ending.unbreakable_streams():
        try:
            return _as_launched(sys.argv[1:] if args is None else args)
        except KeyboardInterrupt:
            return complain("interrupted", results.EXIT_INTERRUPTED)


def _as_launched(args: Sequence[str]) -> int:
    """Run a command line, or under torchrun, in all processes but the first, do what that one says."""
    try:
        launch = torchrun.launched()
    except UsageError as error:
        return complain(f"error: {error}", results.EXIT_USAGE) if launched.speaks() else results.EXIT_USAGE
    if launch is not None and launch.rank != 0:
        return launched.follow(launch, args)
    try:
        launched.refuse_again(launch)
        with launched.leading(launch, args):
            return _run(args)
    except UsageError as error:
        return complain(f"error: {error}", results.EXIT_USAGE)


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
        return complain(f"error: {error.format_message().rstrip('.')}{hint}", results.EXIT_USAGE)
    except UsageError as error:
        return complain(f"error: {error}", results.EXIT_USAGE)
    except Exception as error:  # noqa: BLE001  (the last resort: an internal error must not look like a violation)
        return complain(f"error: {ending.internal_error(error)}", results.EXIT_UNKNOWN)


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


VERBS: tuple[click.Command, ...] = (verify, replay, fuzz, train, doctor, museum, strategies, soak, bench, report, list_)
for verb in VERBS:
    cli.add_command(verb)
