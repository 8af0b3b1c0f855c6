"""What the command line takes, checked before anything runs, and where it writes.

Neither torch nor a subject is imported. Every complaint is one sentence, either a ``click.BadParameter`` (about one
option) or a ``UsageError``, and ends in exit code 2.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from harness.capacity import check_ranks, check_simulation
from harness.errors import UsageError
from harness.launch.process import default_device
from harness.scenario.model import MAX_WORLD
from harness.subjects.source import Scalar

DEFAULT_REPORT = Path("zero2-harness-cases")
DEFAULT_FUZZ = Path(".zero2-fuzz")
MAX_PROBED_WORLD = 8

SCRATCH = ".zero2-*.tmp"
"""Names of files that are being written, in the directory where they are to lie."""


def worlds(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """``1,2,3,4``: distinct world sizes, in the order given (an option's callback)."""
    found: list[int] = []
    for entry in value.split(","):
        text = entry.strip()
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= MAX_WORLD):
            raise click.BadParameter(f"{entry!r} is not a world size (a whole number from 1 to {MAX_WORLD}).")
        if int(text) in found:
            raise click.BadParameter(f"world {int(text)} is given twice.")
        found.append(int(text))
    return tuple(found)


def some_worlds(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """As :func:`worlds`, of an option without a default."""
    return None if value is None else worlds(ctx, param, value)


def doctor_worlds(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """As :func:`worlds`, where there is an order of addition, and few enough pairs of ranks to probe them all."""
    found = worlds(ctx, param, value)
    for world in found:
        if not 2 <= world <= MAX_PROBED_WORLD:
            raise click.BadParameter(
                f"world {world}: the order of addition is measured at 2 to {MAX_PROBED_WORLD} ranks."
            )
    return found


def whole(low: int, high: int = 2**63 - 1) -> Callable[[click.Context, click.Parameter, int | None], int | None]:
    """A whole number from ``low`` to ``high`` (an option's callback)."""

    def check(_ctx: click.Context, _param: click.Parameter, value: int | None) -> int | None:
        if value is not None and not low <= value <= high:
            raise click.BadParameter(f"{value} is not a whole number from {low} to {high}.")
        return value

    return check


def seconds(_ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A finite number of seconds, or minutes, above zero (an option's callback)."""
    if value is not None and not (math.isfinite(value) and value > 0):
        unit = "minutes" if param.name == "minutes" else "seconds"
        raise click.BadParameter(f"{value!r} is not a number of {unit} above zero.")
    return value


def subject_arguments(given: Sequence[str]) -> dict[str, Scalar]:
    """``name=value`` pairs; a value that is a JSON scalar is taken as such, anything else as the text it is."""
    arguments: dict[str, Scalar] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--subject-arg {pair!r}: expected name=value")
        if name in arguments:
            raise UsageError(f"--subject-arg {name}: given twice")
        arguments[name] = _scalar(name, value)
    return arguments


def _scalar(name: str, value: str) -> Scalar:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if isinstance(parsed, float) and not math.isfinite(parsed):
        return value
    if isinstance(parsed, int) and not -(2**63) <= parsed < 2**63:
        raise UsageError(f"--subject-arg {name}: {value} does not fit 64 bits")
    return parsed if parsed is None or isinstance(parsed, str | int | float) else value


def random_seed() -> int:
    """A fresh seed, short enough to retype."""
    return secrets.randbelow(2**32)


def check_current_directory() -> None:
    """Subjects are imported from it, and ranks start in it.

    Raises:
        UsageError: it has been deleted, or cannot be entered.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(f"the current directory cannot be used: {_why(error)}; change into another one") from None


def prepare_report(given: str | None) -> Path:
    """The directory for cases, made now where it was asked for; a later failure must not be lost for want of a place.

    Raises:
        UsageError: cases could not be written there.
    """
    path = DEFAULT_REPORT if given is None else Path(given)
    option = f"cases would be saved in {path}/" if given is None else f"--report {given}"
    hint = "; name another directory with --report" if given is None else ""
    if given is not None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"{option}: cannot make the directory: {_why(error)}") from None
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"{option}: not a directory{hint}")
        _try_to_write(path if path.exists() else Path())
    except OSError as error:
        raise UsageError(f"{option}: cannot write there: {_why(error)}{hint}") from None
    return path


class JsonOutput:
    """Where an option writes: a file (replaced in one go, so that it is never half there) or standard output.

    The check is made on construction, before anything runs.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, given: str, option: str = "--json") -> None:
        self.given = given
        self.to_stdout = given == "-"
        self._stdout: int | None = None
        if self.to_stdout:
            if sys.__stdout__ is None:
                raise UsageError(f"{option} -: standard output is closed")
            return
        try:
            # A symbolic link stays one; what it points to is replaced.
            self._path = Path(os.path.realpath(given))
            if not given or self._path.is_dir():
                raise UsageError(f"{option} {given!r}: expected a file, got {'a directory' if given else 'no name'}")
            self._replace = not self._path.exists() or self._path.is_file()
            if self._path.exists() and not os.access(self._path, os.W_OK):
                raise UsageError(f"{option} {given!r}: cannot write it: permission denied")
            if self._replace:
                _try_to_write(self._path.parent)
        except (OSError, ValueError) as error:
            raise UsageError(f"{option} {given!r}: cannot write it: {_why(error)}") from None

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """With ``-``: keep standard output for the JSON; what else is printed to it, by any process, goes to stderr."""
        if not self.to_stdout:
            yield
            return
        sys.stdout.flush()
        self._stdout = os.dup(1)
        try:
            os.dup2(2, 1)
            yield
        finally:
            sys.stdout.flush()
            os.dup2(self._stdout, 1)
            os.close(self._stdout)
            self._stdout = None

    def write(self, data: bytes) -> None:
        """Write ``data`` whole. A reader of standard output that has gone away is no error.

        Raises:
            OSError: it could not be written after all, for example because the disk is full.
        """
        if self.to_stdout:
            with os.fdopen(os.dup(1 if self._stdout is None else self._stdout), "wb", buffering=0) as stream:
                _write_all(stream, data)
        elif self._replace:
            replace_file(self._path, data)
        else:  # a pipe or a device: nothing to replace
            with self._path.open("wb", buffering=0) as stream:
                _write_all(stream, data)


def check_apart(writes: Sequence[tuple[str, str | None]], reads: Sequence[tuple[str, str | None]] = ()) -> None:
    """Nothing that is written may replace what is read, or what is written besides. Pipes and devices may be shared.

    Args:
        writes: options and what was given to each; None where it was not.
        reads: the same, of files that are read.

    Raises:
        UsageError: it would.
    """
    taken: dict[Path, str] = {}
    for number, (option, given) in enumerate([*reads, *writes]):
        if given is None or given in ("", "-"):
            continue
        try:
            path = Path(os.path.realpath(given))
            shared = path.exists() and not path.is_file()
        except (OSError, ValueError):  # no path at all, as whoever opens it says
            continue
        if shared:
            continue
        if number >= len(reads) and path in taken:
            raise UsageError(f"{option} {given!r}: that is the file of {taken[path]}, which would be lost")
        taken.setdefault(path, option)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the new one, never a part."""
    scratch = path.parent / f".zero2-{secrets.token_hex(8)}.tmp"
    try:
        with scratch.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_all(stream: Any, data: bytes) -> None:  # noqa: ANN401  (an unbuffered binary stream)
    view = memoryview(data)
    try:
        while view:
            view = view[stream.write(view) :]
    except BrokenPipeError:
        pass


def _try_to_write(directory: Path) -> None:
    probe = directory / f".zero2-{secrets.token_hex(8)}.tmp"
    with probe.open("xb"):
        pass
    probe.unlink()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def check_choices(backend: str, order: str | None, schedule: str | None) -> None:
    """Only a simulated world can be told how to add and who runs when.

    Raises:
        UsageError: another backend.
    """
    for option, value in (("--order", order), ("--schedule", schedule)):
        if value is not None and backend != "sim":
            raise UsageError(f"{option} {value}: {backend} leaves no such choice; add --backend sim")


def chosen_device(backend: str, device: str | None) -> str:
    """Where tensors lie: what ``--device`` says, else what goes with the backend.

    Raises:
        UsageError: NCCL on the CPU.
    """
    if backend == "nccl" and device == "cpu":
        raise UsageError("--device cpu: nccl moves tensors of GPUs only; use --backend gloo or sim, or leave it out")
    return device or default_device(backend)


def check_backend(backend: str, worlds: Sequence[int], device: str | None = None) -> None:
    """Refuse ranks that cannot be started; ``device`` is as :func:`chosen_device` gave it (None: the backend's own).

    NCCL wants one GPU a rank; a child process is asked, since this one never imports torch.

    Raises:
        UsageError: too little memory, or too low a limit; fewer GPUs than needed, or a torch without NCCL.
    """
    if (device or default_device(backend)) == "cuda":
        _check_gpus(backend, worlds)
    if backend == "sim":
        check_simulation(worlds)
    else:
        check_ranks(worlds)


def _check_gpus(backend: str, worlds: Sequence[int]) -> None:
    option = "--backend nccl" if backend == "nccl" else "--device cuda"
    question = "import torch; print(int(torch.distributed.is_nccl_available()), torch.cuda.device_count())"
    command = [sys.executable, "-P", "-c", question]  # a torch.py in the current directory is not meant
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.DEVNULL
        )
    except subprocess.SubprocessError as error:
        printed = (getattr(error, "stderr", None) or "").strip().splitlines()
        raise UsageError(f"{option}: torch cannot be asked for its GPUs: {(printed or [error])[-1]}") from None
    words = answer.stdout.split()[-2:]  # an import may print lines of its own before
    if backend == "nccl" and words[0] != "1":
        raise UsageError("--backend nccl: this torch was built without NCCL; use --backend gloo")
    num_gpus = int(words[1])
    if backend != "nccl" and num_gpus == 0:
        raise UsageError("--device cuda: no GPU is visible; leave it out, or show torch a GPU (CUDA_VISIBLE_DEVICES)")
    if backend == "nccl" and num_gpus < max(worlds):
        gpus = "no GPU is" if num_gpus == 0 else ("1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are")
        raise UsageError(
            f"--backend nccl: world {max(worlds)} needs {max(worlds)} GPUs, one a rank, but {gpus} visible; "
            "use --backend gloo or a smaller --world"
        )
