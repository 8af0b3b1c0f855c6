"""What is told of a violation: its case, saved; a test to paste; the command that replays it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.diagnosis.picture import evidence_of
from harness.explain import Found
from harness.launch.process import default_device
from harness.report.console import describe
from harness.report.paste import pytest_test
from harness.report.result import Failure
from harness.scenario import codec
from harness.sim.choices import DEFAULT_ORDER, DEFAULT_SCHEDULE
from harness.subjects.source import is_local

if TYPE_CHECKING:
    from harness.runner import CampaignOptions


def failure_of(found: Found) -> Failure:
    """A violation for people and programs, of which no case is saved."""
    divergence, evaluation = found.evaluation.divergence, found.evaluation
    if divergence is None:
        raise ValueError("a violation without a divergence")
    return Failure(
        **divergence.summary(),
        scenario=describe(found.scenario),
        output=evaluation.output or None,
        ranks=evaluation.accounts or None,
        cut_short=found.cut_short,
        evidence=evidence_of(found.scenario, divergence, evaluation.observations, evaluation.places),
    )


def saved_failure(options: CampaignOptions, found: Found, replayed: tuple[codec.Case, Path] | None = None) -> Failure:
    """The same; its case is saved, unless it came out of a file."""
    failure, divergence = failure_of(found), found.evaluation.divergence
    summary = {} if divergence is None else divergence.summary()
    subject = codec.SubjectReference(
        options.subject.given, options.subject.absolute, options.subject.args, options.subject.config
    )
    path: Path | None = None
    note = "" if found.cut_short is None else f" ({found.cut_short})"
    if replayed is not None:
        named, path = replayed[0].subject, replayed[1]
    else:
        named = subject
        try:
            path = codec.save(codec.Case(found.scenario, subject, summary, found.relation), options.report)
        except (OSError, ValueError) as error:
            note += f" (the case could not be saved: {error})"
    name_subject = named != subject or not is_local(options.subject)
    return msgspec.structs.replace(
        failure,
        message=f"{failure.message}{note}",
        case=None if path is None else os.fspath(path),
        test=pasted_test(
            options, replayed[0] if replayed is not None else codec.Case(found.scenario, relation=found.relation), path
        ),
        replay=None if path is None else replay_command(options, path, name_subject=name_subject),
    )


def pasted_test(options: CampaignOptions, case: codec.Case, path: Path | None) -> str | None:
    """A file of tests that runs the case, ready to paste; what is as always is not said in it."""
    given: dict[str, object] = {"backend": options.backend}
    if options.device not in (None, default_device(options.backend)):
        given["device"] = options.device
    if options.order != DEFAULT_ORDER:
        given["order"] = options.order
    if options.schedule != DEFAULT_SCHEDULE:
        given["schedule"] = options.schedule
    if options.timeout_s is not None:
        given["timeout_s"] = options.timeout_s
    if options.stall_s is not None:
        given["stall_s"] = options.stall_s
    return pytest_test(case, path, options.subject.given, options.subject.args, given)


def replay_command(options: CampaignOptions, path: Path, *, name_subject: bool) -> str:
    """The command that runs a saved case again, as this campaign would."""
    words = ["python", "-m", "harness", "replay", os.fspath(path)]
    if name_subject:
        words += ["--subject", options.subject.given]
        for name, value in options.subject.args.items():
            words += ["--subject-arg", f"{name}={msgspec.json.encode(value).decode()}"]
    if options.timeout_s is not None:
        words += ["--timeout", f"{options.timeout_s:g}"]
    if options.stall_s is not None:
        words += ["--stall", f"{options.stall_s:g}"]
    if options.backend != "gloo":
        words += ["--backend", options.backend]
    if options.device is not None and options.device != default_device(options.backend):
        words += ["--device", options.device]
    if options.order != DEFAULT_ORDER:
        words += ["--order", options.order]
    if options.schedule != DEFAULT_SCHEDULE:
        words += ["--schedule", options.schedule]
    return shlex.join(words)
