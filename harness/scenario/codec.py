"""Case files and parameter lists: strict, versioned JSON.

A case file holds the fields of one :class:`~harness.scenario.model.Scenario` and, optionally, the ``subject`` it was
run on and the ``failure`` it showed. Nothing in a file is executed. Whatever is wrong with it is one
:class:`~harness.errors.CaseError`, a line of the form ``FILE: $.path.of.field: expected ..., got ...``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
import typing
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from harness.errors import CaseError
from harness.faults.language import KINDS, Corrupt, Hang
from harness.scenario import muon, strategy
from harness.scenario.model import MAX_ELEMENTS, SCHEMA_VERSION, Count, Domain, Operation, Parameter, Scenario, check
from harness.scenario.relations import Relation, RelationReference
from harness.verdict import Stage

MAX_BYTES = 16 * 2**20
MAX_DEPTH = 32  # a scenario has 5 levels; the rest is for the summary of a failure

Scalar = str | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | bool | None

T = TypeVar("T")


_Name = Annotated[str, Meta(max_length=5000)]  # Linux has no path longer than 4096


class SubjectReference(Struct, frozen=True, forbid_unknown_fields=True):
    """Which class a case was run on: as the user named it, the same as an absolute path, and its further arguments.

    ``config``: of a distribution strategy, where the user gave one.
    """

    given: _Name
    absolute: _Name
    args: dict[str, Scalar] = {}
    config: dict[str, Any] | None = None


class Case(Struct, frozen=True):
    """What a case file holds; ``failure`` is plain JSON for the reader of the file, and nothing depends on it.

    ``relation``: to the other scenario that it is to be run and compared with.
    """

    scenario: Scenario
    subject: SubjectReference | None = None
    failure: dict[str, Any] | None = None
    relation: RelationReference | None = None


class _CaseFile(Scenario, frozen=True, forbid_unknown_fields=True):
    """A case as it lies in a file: flat."""

    subject: SubjectReference | None = None
    failure: dict[str, Any] | None = None
    relation: RelationReference | None = None


class _Listed(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]


_Listing = Annotated[tuple[_Listed, ...], Meta(min_length=1, max_length=100_000)]

# For each older version, what turns the decoded JSON of a case into that of the next version. May raise the errors
# that plain dictionary and list handling raises on unexpected input.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def _literals(form: type[Struct], field: str) -> list[str]:
    """The words that a field of a struct may be."""
    return list(typing.get_args(typing.get_type_hints(form)[field]))


# msgspec does not say what would have been valid in these fields.
_CHOICES = {
    "op": [operation.__struct_config__.tag for operation in typing.get_args(Operation)],
    "dtype": ["bf16", "fp16", "fp32"],
    "domain": [domain.value for domain in Domain],
    "system": _literals(Scenario, "system"),
    "name": [relation.value for relation in Relation],
    "fault": list(KINDS),
    "stage": [stage.value for stage in Stage],
    "how": _literals(Hang, "how"),
    "what": _literals(Corrupt, "what"),
    "kind": [form.__struct_config__.tag for form in (muon.GlobalClip, muon.AdaptiveClip)],
    "split": _literals(muon.Mark, "split"),
    "use": _literals(muon.Mark, "use"),
    "coefficients": _literals(muon.MuonSettings, "coefficients"),
    "ns_dtype": _literals(muon.MuonSettings, "ns_dtype"),
    "scale": _literals(muon.MuonSettings, "scale"),
    "owner_rule": _literals(muon.Sharding, "owner_rule"),
    "backward": _literals(muon.Muon, "backward"),
    "sharding": _literals(strategy.Strategy, "sharding"),
    "reduce": _literals(strategy.Strategy, "reduce"),
    "compute": _literals(strategy.Strategy, "compute"),
    "accumulation": _literals(strategy.Strategy, "accumulation"),
}


def encode(case: Case) -> bytes:
    """The text of a case file: UTF-8 JSON, one line for each parameter, operation and fault.

    Non-finite numbers in ``failure`` become null: JSON has none.
    """
    header = {"version": case.scenario.version, "system": case.scenario.system}
    fields = {**header, **msgspec.to_builtins(case.scenario)}
    if not case.scenario.faults:
        del fields["faults"]
    for system in ("muon", "strategy"):
        if getattr(case.scenario, system) is None:
            del fields[system]
    if case.subject is not None:
        fields["subject"] = msgspec.to_builtins(case.subject)
        if case.subject.config is None:
            del fields["subject"]["config"]
    if case.relation is not None:
        fields["relation"] = msgspec.to_builtins(case.relation)
    if case.failure is not None:
        fields["failure"] = case.failure
    lines = []
    for name, value in fields.items():
        if name in ("parameters", "operations", "faults"):
            items = ",\n    ".join(_json(item) for item in value)
            lines.append(f'"{name}": [\n    {items}\n  ]')
        else:
            lines.append(f'"{name}": {_json(value)}')
    return ("{\n  " + ",\n  ".join(lines) + "\n}\n").encode()


def decode(data: bytes, source: str = "case") -> Case:
    """The case in ``data``, checked in structure and in meaning.

    Args:
        data: UTF-8 JSON of a case file.
        source: what to call it in an error, such as the file's name.

    Raises:
        CaseError: anything else than a valid case of this or an older version.
    """
    raw = _current(_parse(data, source), source)
    fields = _convert(raw, _CaseFile, source)
    scenario = Scenario(**{name: getattr(fields, name) for name in Scenario.__struct_fields__})
    problem = check(scenario)
    if problem is not None:
        raise CaseError(f"{source}: $.{problem}")
    return Case(scenario, fields.subject, fields.failure, fields.relation)


def load(path: Path) -> Case:
    """The case in a file.

    Raises:
        CaseError: the file cannot be read, or holds no valid case.
    """
    return decode(_read(path), str(path))


def save(case: Case, directory: Path, stem: str = "case") -> Path:
    """Write ``STEM-DIGEST.json``, whole or not at all; a file of other content is never replaced.

    Args:
        case: what to write.
        directory: made when missing.
        stem: first part of the name; the second is taken from the content.

    Returns:
        The file's path. The same case gives the same path and the same bytes.

    Raises:
        ValueError: the case could not be read back (it is not valid).
        OSError: it cannot be written.
    """
    data = encode(case)
    try:
        decode(data)
    except CaseError as error:
        raise ValueError(f"this case cannot be saved: {error}") from None
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{stem}-{hashlib.sha256(data).hexdigest()[:12]}"
    for number in count(1):
        path = directory / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        if not os.path.lexists(path):
            break
        if path.is_file() and path.read_bytes() == data:
            return path
    scratch = directory / f".{name}-{secrets.token_hex(8)}.tmp"
    try:
        with scratch.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def load_parameters(path: Path) -> tuple[Parameter, ...]:
    """The user's own model: a JSON list of ``{"name": str, "shape": [int, ...]}``, all bf16.

    Raises:
        CaseError: the file cannot be read, or is no such list.
    """
    source = str(path)
    listed = _convert(_parse(_read(path), source), _Listing, source)
    seen: dict[str, int] = {}
    for index, entry in enumerate(listed):
        first = seen.setdefault(entry.name, index)
        if first != index:
            raise CaseError(f"{source}: $[{index}].name: {entry.name!r} is the name of $[{first}] already")
    numel = sum(math.prod(entry.shape) for entry in listed)
    if not 1 <= numel <= MAX_ELEMENTS:
        raise CaseError(f"{source}: $: expected 1 to {MAX_ELEMENTS} elements in all, got {numel}")
    for index, entry in enumerate(listed):
        if Parameter(entry.name, entry.shape).extent > MAX_ELEMENTS:
            raise CaseError(f"{source}: $[{index}].shape: dimensions other than 0 multiply to over {MAX_ELEMENTS}")
    return tuple(Parameter(entry.name, entry.shape) for entry in listed)


def load_configuration(path: Path) -> dict[str, Any]:
    """The configuration of a distribution strategy: a JSON object; what its keys mean is not looked at.

    Raises:
        CaseError: the file cannot be read, or holds something else.
    """
    source = str(path)
    found = _parse(_read(path), source)
    if not isinstance(found, dict):
        raise CaseError(f"{source}: $: expected an object of keys and values, got {_kind(found)}")
    try:
        msgspec.msgpack.encode(found)
    except OverflowError:
        raise CaseError(f"{source}: expected numbers of 64 bits, got a larger one") from None
    return found


def _json(value: object) -> str:
    """One line of JSON with spaces."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _read(path: Path) -> bytes:
    """The bytes of a regular file of at most ``MAX_BYTES``."""
    try:
        # A pipe without a writer would block for ever: look before opening.
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise CaseError(f"{path}: expected a JSON file, got a directory")
        if not stat.S_ISREG(mode):
            raise CaseError(f"{path}: expected a JSON file, got something that is not a regular file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        raise CaseError(f"{path}: {'no such file' if error.errno == errno.ENOENT else reason}") from None
    except ValueError as error:  # a NUL in the name
        raise CaseError(f"{path}: {error}") from None
    if len(data) > MAX_BYTES:
        raise CaseError(f"{path}: expected at most {MAX_BYTES} bytes, got more")
    return data


class _Twice(dict[str, Any]):
    """A JSON object in which one key stands twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.name = Counter(name for name, _ in pairs).most_common(1)[0][0]


class _BadValue(Exception):  # noqa: N818  (never leaves this module)
    """What is wrong with a JSON value; the path to it grows while the exception passes the values around it."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path = ""


def _parse(data: bytes, source: str) -> Any:  # noqa: ANN401  (any JSON value)
    """The JSON value in ``data``: finite numbers, valid text, no key twice, limited in depth."""
    if len(data) > MAX_BYTES:
        raise CaseError(f"{source}: expected at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise CaseError(f"{source}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CaseError(f"{source}: expected JSON: {error.msg} at {where}") from None
    except ValueError:  # Python reads no integer of more than a few thousand digits
        raise CaseError(f"{source}: expected numbers of 64 bits, got one of thousands of digits") from None
    except RecursionError:
        raise CaseError(f"{source}: nested too deeply, expected at most {MAX_DEPTH} levels") from None
    try:
        _inspect(value, 0)
    except _BadValue as bad:
        raise CaseError(f"{source}: ${bad.path}: {bad.reason}") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(pairs)


def _inspect(value: object, depth: int) -> None:
    """Raise :class:`_BadValue` for what Python's JSON parser lets through and a case must not hold."""
    if depth > MAX_DEPTH:
        raise _BadValue(f"nested too deeply, expected at most {MAX_DEPTH} levels")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _BadValue(f"expected a finite number, got {value}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            try:
                _inspect(item, depth + 1)
            except _BadValue as bad:
                bad.path = f"[{index}]{bad.path}"
                raise
    elif isinstance(value, dict):
        if isinstance(value, _Twice):
            raise _BadValue(f"the key {value.name!r} stands twice")
        for name, item in value.items():
            _check_text(name)
            try:
                _inspect(item, depth + 1)
            except _BadValue as bad:
                bad.path = f".{name}{bad.path}"
                raise


def _check_text(text: str) -> None:
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise _BadValue(f"expected text, got a lone surrogate in {text!r}")


def _current(raw: object, source: str) -> dict[str, Any]:
    """The decoded JSON of a case, migrated to the current version."""
    if not isinstance(raw, dict):
        raise CaseError(f"{source}: $: expected an object, got {_kind(raw)}")
    if "version" not in raw:
        raise CaseError(f"{source}: $: missing required field `version`")
    version = raw["version"]
    if type(version) is not int:
        raise CaseError(f"{source}: $.version: expected `int`, got {_kind(version)}")
    if version > SCHEMA_VERSION:
        raise CaseError(
            f"{source}: $.version: written by a newer version ({version}), this one reads up to {SCHEMA_VERSION}"
        )
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise CaseError(f"{source}: $.version: expected {SCHEMA_VERSION}, got {version}")
        try:
            raw = MIGRATIONS[version](raw)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CaseError(f"{source}: $: no valid case of version {version}: {error!r}") from None
        version += 1
    return {**raw, "version": version}


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "`bool`", str: "`str`", float: "`float`", int: "`int`", list: "an array"}
    return names.get(type(value), "an object")


def _convert(raw: object, form: type[T], source: str) -> T:
    try:
        return msgspec.convert(raw, form, strict=True)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).rpartition(" - at `")
        reason, path = (reason, path.removesuffix("`")) if reason else (str(error), "$")
        reason = reason[:1].lower() + reason[1:]
        choices = _CHOICES.get(path.rpartition(".")[2])
        if choices and reason.startswith("invalid"):
            reason = f"expected one of {', '.join(map(repr, choices))}, got {reason.partition(' value ')[2]}"
        raise CaseError(f"{source}: {path}: {reason}") from None
