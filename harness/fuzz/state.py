"""What a fuzz campaign keeps on disk, so that it goes on where it stopped, however it was stopped.

In the campaign's directory: ``campaign.json`` (what is fuzzed), ``rounds/N.json`` and ``ids/N.txt`` for each round that
is done, ``findings/NAME.json``, the cases in ``cases/`` (or elsewhere, with ``--report``), the example database of
Hypothesis in ``examples/``, what workers print in ``workers/``. A file is there whole or not at all. Rounds are written
by the campaign's process alone, findings by the worker that has them, before anybody is told.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

import harness
from harness.errors import UsageError
from harness.fuzz.messages import Key, Slow, kind_of
from harness.inputs import DEFAULT_FUZZ, SCRATCH, replace_file
from harness.report import result as results
from harness.report.result import Failure
from harness.scenario import codec
from harness.scenario.model import Scenario
from harness.subjects.source import Scalar, SubjectSource
from harness.tally import Counts

SCHEMA = 1
EXAMPLES = "examples"

_FOLDERS = ("rounds", "ids", "findings", "cases", "workers")

_T = TypeVar("_T")


def scenario_id(scenario: Scenario) -> str:
    """16 hex digits: equal for equal scenarios, on any machine."""
    return hashlib.sha256(codec.encode(codec.Case(scenario))).hexdigest()[:16]


class Identity(Struct, frozen=True, kw_only=True):
    """What must be the same for the rounds of one run to be worth anything to another.

    ``code``: see :func:`code_of`.
    """

    subject: str
    args: dict[str, Scalar] = {}
    worlds: tuple[int, ...]
    backend: str
    order: str
    schedule: str
    seed: int
    code: str
    versions: dict[str, str]
    schema: int = SCHEMA
    config: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Of what the command line says of it, except for the seed: names the default directory."""
        said: tuple[object, ...] = (
            self.subject,
            sorted(self.args.items()),
            self.worlds,
            self.backend,
            self.order,
            self.schedule,
        )
        if self.config is not None:
            said = (*said, msgspec.json.encode(self.config, order="sorted"))
        return hashlib.sha256(repr(said).encode()).hexdigest()[:8]

    def differences(self, other: Identity) -> list[str]:
        """What is not the same, in words."""
        pairs = zip(msgspec.structs.asdict(self).items(), msgspec.structs.asdict(other).values(), strict=True)
        return [_difference(name, mine, theirs) for (name, mine), theirs in pairs if mine != theirs]


def _difference(name: str, mine: object, theirs: object) -> str:
    match name:
        case "code":
            return "the code of the subject, or of the harness, has changed since, so that its rounds no longer count"
        case "versions":
            return "versions have changed"
    return f"{name} was {theirs}, is {mine}"


def code_of(subject: SubjectSource) -> str:
    """Digest of the code that decides what a round is and what it shows, as far as it can be known without importing:
    the harness itself, our own systems, and what lies beside the subject's file, or in its top-level package."""
    root = Path(harness.__file__).parent
    files = sorted([*root.rglob("*.py"), *(root.parent / "zero2core").rglob("*.py")])
    where = subject.absolute.rpartition(":")[0]
    if where.endswith(".py"):
        files += sorted(Path(where).parent.glob("*.py"))
    elif where:
        files += _package(where.partition(".")[0])
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _package(name: str) -> list[Path]:
    """The files of a top-level package or module, found as ranks will find it, without importing it."""
    with suppress(ImportError, ValueError, OSError):
        for finder in (str(Path.cwd()), *sys.path):
            spec = importlib.machinery.PathFinder.find_spec(name, [finder])
            if spec is None:
                continue
            places = [Path(place) for place in spec.submodule_search_locations or ()]
            found = [file for place in places for file in sorted(place.rglob("*.py"))]
            return found or ([Path(spec.origin)] if spec.origin else [])
    return []


def default_directory(identity: Identity) -> Path:
    """Where a campaign is kept unless another place is named."""
    name = "".join(char if char.isalnum() else "-" for char in identity.subject.rpartition("/")[2])
    return DEFAULT_FUZZ / f"{name.strip('-')[-40:]}-{identity.digest}"


class RoundRecord(Struct, frozen=True, kw_only=True):
    """One round that is done: at most ``limit`` scenarios of it, ``num_examples`` were run.

    ``ids``: digest of the file that holds theirs.
    """

    index: int
    kind: str
    limit: int
    num_examples: int
    counts: Counts
    slowest: Slow | None = None
    ids: str = ""


class Finding(Struct, frozen=True, kw_only=True):
    """A violation.

    ``seen``: how it looked before it was made smaller. ``complete``: it was made as small as it gets; if not, the round
    in which it was found is run again. ``foreign``: seen in another campaign or with other code, and not tried here
    yet.
    """

    name: str
    round: int | None
    seen: Key
    complete: bool
    failure: Failure
    foreign: bool = False

    @property
    def key(self) -> Key:
        """What makes it the same as another. Where all evidence together leaves no symptom, the first look counts."""
        symptom = kind_of(self.failure.symptom) or self.seen.symptom
        return Key(self.failure.property, self.failure.stage, symptom)


class State:
    """A campaign's directory, of which this process is the only user: see :func:`opened`.

    Attributes:
        rounds: Those that are done, by index. One of which a file is damaged or missing is done again.
        damaged: Files of findings that cannot be read.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.directory = directory
        self.identity = identity
        self.rounds: dict[int, RoundRecord] = {}
        for path in sorted((directory / "rounds").glob("*.json")):
            record = _read(path, RoundRecord)
            if (
                record is not None
                and path.stem == f"{record.index:06}"
                and self._ids_digest(record.index) == record.ids
            ):
                self.rounds[record.index] = record
        self.damaged = [path for path in _finding_files(directory) if _read(path, Finding) is None]

    @property
    def examples(self) -> Path:
        """The example database of Hypothesis."""
        return self.directory / EXAMPLES

    @property
    def cases(self) -> Path:
        """Where cases are saved unless another place is named."""
        return self.directory / "cases"

    def ids(self, index: int) -> list[str]:
        """Of the scenarios of a round, in order; empty if it is not done."""
        return self._ids_bytes(index).decode(errors="replace").split()

    @property
    def ids_digest(self) -> str:
        """Of the ids of all rounds that are done, in order."""
        digest = hashlib.sha256()
        for index in sorted(self.rounds):
            digest.update(f"{index}:{' '.join(self.ids(index))}\n".encode())
        return digest.hexdigest()[:16]

    def keep(self, record: RoundRecord, ids: Sequence[str]) -> None:
        """A round is done.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self._ids_path(record.index), "".join(f"{each}\n" for each in ids).encode())
        record = msgspec.structs.replace(record, ids=self._ids_digest(record.index))
        replace_file(self.directory / "rounds" / f"{record.index:06}.json", msgspec.json.encode(record))
        self.rounds[record.index] = record

    def findings(self) -> list[Finding]:
        """All that are known, in the order in which they would be found by one worker."""
        found = [load_finding(self.directory, path.stem) for path in _finding_files(self.directory)]
        known = [each for each in found if each is not None]
        return sorted(known, key=lambda each: (each.round is not None, each.round or 0, each.name))

    def forget(self, name: str) -> None:
        """A finding does not fail any more; its case stays."""
        (self.directory / "findings" / f"{name}.json").unlink(missing_ok=True)

    def log(self, worker: int) -> Path:
        """Where a worker prints."""
        return self.directory / "workers" / f"{worker}.log"

    def _ids_path(self, index: int) -> Path:
        return self.directory / "ids" / f"{index:06}.txt"

    def _ids_bytes(self, index: int) -> bytes:
        try:
            return self._ids_path(index).read_bytes()
        except OSError:
            return b""

    def _ids_digest(self, index: int) -> str:
        return hashlib.sha256(self._ids_bytes(index)).hexdigest()[:16]


def save_finding(directory: Path, finding: Finding) -> None:
    """Write or replace a finding of the campaign in ``directory``.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(directory / "findings" / f"{finding.name}.json", results.to_json(finding))


def load_finding(directory: Path, name: str) -> Finding | None:
    """A finding of the campaign in ``directory``, its case where that lies now; None if there is none of that name."""
    finding = _read(directory / "findings" / f"{name}.json", Finding)
    if finding is None or finding.failure.case is None or Path(finding.failure.case).is_file():
        return finding
    # The directory has been moved, or is named from elsewhere.
    now = directory / "cases" / Path(finding.failure.case).name
    return _with_case_at(finding, now) if now.is_file() else finding


def _with_case_at(finding: Finding, case: Path) -> Finding:
    failure, now = finding.failure, os.fspath(case)
    before = failure.case or now
    return msgspec.structs.replace(
        finding,
        failure=msgspec.structs.replace(
            failure,
            case=now,
            test=None if failure.test is None else failure.test.replace(before, now),
            replay=None if failure.replay is None else failure.replay.replace(before, now),
        ),
    )


def _finding_files(directory: Path) -> list[Path]:
    return sorted((directory / "findings").glob("*.json"))


@contextmanager
def opened(directory: Path, identity: Identity, *, seed: int | None, fresh: bool) -> Iterator[State]:
    """The campaign in ``directory``, begun now if there is none.

    Args:
        directory: of the campaign.
        identity: what is to be fuzzed; its seed is that of a new campaign.
        seed: what the user asked for; None: whatever seed the campaign has.
        fresh: begin at round 0 again; what was found is kept, and tried first.

    Raises:
        UsageError: it cannot be used, another process uses it, or it is a campaign of something else.
    """
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if directory.parent == DEFAULT_FUZZ:
                (DEFAULT_FUZZ / ".gitignore").write_text("*\n")  # a place nobody chose
            stack.enter_context(_locked(directory))
            for name in _FOLDERS:
                (directory / name).mkdir(exist_ok=True)
            _tidy(directory)
            path = directory / "campaign.json"
            kept = _read(path, Identity)
            if path.exists() and kept is None and not fresh:
                raise UsageError(f"{path}: not a campaign that this version can read; begin again with --fresh")
            if kept is not None and not fresh:
                identity = _same(directory, kept, identity, seed)
            else:
                _begin_again(directory)
                replace_file(path, msgspec.json.format(msgspec.json.encode(identity), indent=2))
            state = State(directory, identity)
        except OSError as error:
            raise UsageError(f"--dir {directory}: cannot be used: {_why(error)}") from None
        yield state


def _tidy(directory: Path) -> None:
    """Remove what was being written when a process was killed."""
    for folder in (directory, *(directory / name for name in _FOLDERS)):
        for path in folder.glob(SCRATCH):
            path.unlink(missing_ok=True)


def _why(error: OSError) -> str:
    said, where = error.strerror or str(error), error.filename2 or error.filename
    return said if where is None else f"{where}: {said}"


def _begin_again(directory: Path) -> None:
    """Forget the rounds. What was found in them is known from its case alone."""
    for name in ("rounds", "ids"):
        shutil.rmtree(directory / name)
        (directory / name).mkdir()
    for path in _finding_files(directory):
        finding = load_finding(directory, path.stem)
        if finding is not None and not finding.foreign:
            name = f"kept-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
            save_finding(
                directory, msgspec.structs.replace(finding, name=name, round=None, complete=True, foreign=True)
            )
            path.unlink()


def _same(directory: Path, kept: Identity, wanted: Identity, seed: int | None) -> Identity:
    if seed is None:
        wanted = msgspec.structs.replace(wanted, seed=kept.seed)
    different = wanted.differences(kept)
    if different:
        raise UsageError(
            f"{directory}: the campaign there cannot go on: {'; '.join(different)}; "
            "begin again with --fresh (what it found is kept, and tried first), or use another --dir"
        )
    return kept


def merge(state: State, others: Sequence[Path]) -> tuple[int, int]:
    """Take over what campaigns in other directories (of other machines, say) have found, and the rounds they did where
    they are the same campaign; their example databases are left to whoever knows them.

    Returns:
        How many rounds and how many findings came from there.

    Raises:
        UsageError: one of them is no campaign's directory, or cannot be copied.
    """
    num_rounds = num_findings = 0
    for directory in others:
        try:
            new_rounds, new_findings = _merge(state, directory)
        except OSError as error:
            raise UsageError(f"--merge {directory}: cannot be taken over: {_why(error)}") from None
        num_rounds += new_rounds
        num_findings += new_findings
    return num_rounds, num_findings


def _merge(state: State, directory: Path) -> tuple[int, int]:
    kept = _read(directory / "campaign.json", Identity)
    if kept is None:
        raise UsageError(f"--merge {directory}: no campaign in it that this version can read")
    num_rounds = num_findings = 0
    if not state.identity.differences(kept):
        other = State(directory, kept)
        for index, record in other.rounds.items():
            mine = state.rounds.get(index)
            if mine is None or mine.limit < record.limit:
                state.keep(record, other.ids(index))
                num_rounds += 1
    known = {_content(finding) for finding in state.findings()}
    for path in _finding_files(directory):
        finding = load_finding(directory, path.stem)
        content = None if finding is None else _content(finding)
        if finding is not None and content is not None and content not in known:
            _adopt(state, finding, content)
            known.add(content)
            num_findings += 1
    return num_rounds, num_findings


def _content(finding: Finding) -> bytes | None:
    """Of its case; None where there is none."""
    try:
        return None if finding.failure.case is None else Path(finding.failure.case).read_bytes()
    except OSError:
        return None


def _adopt(state: State, finding: Finding, content: bytes) -> None:
    """Keep a finding of elsewhere, and its case."""
    digest = hashlib.sha256(content).hexdigest()[:12]
    target = state.cases / f"case-{digest}.json"
    replace_file(target, content)
    adopted = msgspec.structs.replace(finding, name=f"merged-{digest}", round=None, complete=True, foreign=True)
    save_finding(state.directory, _with_case_at(adopted, target))


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another fuzz campaign is running there; use another --dir") from None
        yield


def _read(path: Path, form: type[_T]) -> _T | None:
    """What a file of ours holds; None if there is none, or of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (OSError, msgspec.MsgspecError):
        return None
