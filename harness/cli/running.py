"""What verbs do alike: choose a subject, run, show, write the result; every end is an exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from harness import ending, inputs
from harness.cli.options import DEFAULT_SUBJECT
from harness.errors import UsageError, one_line
from harness.launch.process import default_device
from harness.launch.torchrun import leave_word
from harness.report import result as results
from harness.report.console import ProgressReport, TextConsole, print_result
from harness.report.result import Examples, Result, Verb
from harness.scenario.model import Parameter

if TYPE_CHECKING:
    from harness.recording import CampaignRecording
    from harness.report.events import EventLog
    from harness.runner import CampaignOptions
    from harness.scenario.codec import SubjectReference
    from harness.subjects.source import Scalar, SubjectSource

T = TypeVar("T")


def judge(
    run: Callable[[ProgressReport | CampaignRecording], Result],
    options: CampaignOptions,
    output: inputs.JsonOutput | None,
    *,
    first: str,
    campaign: bool,
    log: EventLog | None = None,
) -> int:
    """Run a campaign, or the replay of one case: show progress, write the result and print it; the exit code."""
    from harness.recording import CampaignRecording, concluded, kept

    verb: Verb = "verify" if campaign else "replay"
    with streams(output) as (text, errors), kept(log):
        TextConsole(text).say(first)
        shown = ProgressReport(errors)
        if log is None:
            result = result_of(shown, run, options, verb)
        else:
            result = result_of(CampaignRecording(shown, log, verb, options), run, options, verb)
        if result.verdict != "holds":
            why = result.reason if result.failure is None else result.failure.message
            leave_word(one_line(f"{result.verdict}: {why or 'interrupted'}"))
        code = deliver(output, result, result.exit_code)
        concluded(log, result, code)
        print_result(text, result, campaign=campaign)
        return code


def result_of(
    shown: AbstractContextManager[T], run: Callable[[T], Result], options: CampaignOptions, verb: Verb
) -> Result:
    """What ``run`` gives, with its progress shown; whatever happens there, there is a result."""
    began = time.monotonic()
    try:
        with shown as progress:
            return run(progress)
    except UsageError:
        raise
    except KeyboardInterrupt:
        seconds = time.monotonic() - began
        return _undecided(options, verb, "interrupted before any result", seconds, interrupted=True)
    except Exception as error:  # noqa: BLE001  (an internal error is "unknown", with a result like any other)
        return _undecided(options, verb, ending.internal_error(error), time.monotonic() - began)


@contextmanager
def streams(output: inputs.JsonOutput | None) -> Iterator[tuple[IO[str], IO[str]]]:
    """Where results and where progress and complaints go, as text; both stderr when stdout is for the JSON."""
    with nullcontext() if output is None else output.reserved():
        yield (sys.stderr if output is not None and output.to_stdout else sys.stdout), sys.stderr


def deliver(output: inputs.JsonOutput | None, result: object, code: int) -> int:
    """Write the JSON; the exit code, which a lost result turns from "holds" into "unknown"."""
    if output is not None:
        try:
            output.write(results.to_json(result))
        except OSError as error:
            code = code or results.EXIT_UNKNOWN
            complain(f"error: --json {output.given}: the result could not be written: {error.strerror}", code)
    return code


def _undecided(
    options: CampaignOptions, verb: Verb, reason: str, seconds: float, *, interrupted: bool = False
) -> Result:
    return Result(
        verdict="unknown",
        subject=options.subject.given,
        backend=options.backend,
        device=options.device or default_device(options.backend),
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
        verb=verb,
    )


def parameters_of(preset: str | None, params: str | None) -> tuple[Parameter, ...] | None:
    """The list that ``--preset`` or ``--params`` names; None where neither is given."""
    if params is not None:
        from harness.scenario.codec import load_parameters

        return load_parameters(Path(params))
    if preset is not None:
        from harness.scenario import presets

        return presets.parameters(preset)
    return None


def subject_of(subject: str | None, subject_args: Sequence[str], config_path: str | None) -> SubjectSource:
    """The subject that the command line names."""
    from harness.subjects.builtin import CONFIGURED
    from harness.subjects.source import parse

    source = parse(DEFAULT_SUBJECT if subject is None else subject, inputs.subject_arguments(subject_args))
    if config_path is not None:
        return configured(source, config_path)
    if source.absolute == CONFIGURED:
        raise UsageError(f"--subject {CONFIGURED}: give its configuration with --config FILE.json")
    return source


def configured(source: SubjectSource, config_path: str) -> SubjectSource:
    """The subject with the configuration of ``--config``."""
    from harness.scenario.codec import load_configuration
    from harness.subjects.builtin import CONFIGURED
    from harness.subjects.source import with_config
    from harness.subjects.strategy_offers import summary_of

    config = load_configuration(Path(config_path))
    configured = with_config(source, config)
    if source.absolute == CONFIGURED:
        TextConsole(sys.stderr).say(f"strategy: {summary_of(config)}")
    return configured


def case_subject(
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


def complain(message: str, code: int) -> int:
    """One line on stderr, and where a launcher reads it; returns ``code``."""
    if code:
        leave_word(message)
    TextConsole(sys.stderr).say(" ".join(message.splitlines()))
    return code
