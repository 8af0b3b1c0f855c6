"""New cases as a patch that adds them to harness/regressions: ``make regressions``.

``python -m ci.regressions PATCH DIR...``: each DIR is a directory of saved cases (``--report``), that of a fuzz
campaign (``--dir``), of which the cases of its findings count, or one that holds such campaigns. What is left
out is counted, with the reason: a case that is in harness/regressions already, say. Without a new case there is no
patch. Exit codes: 0; 2: a case cannot be read (the others are in the patch all the same).
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from harness.errors import CaseError, UsageError
from harness.fuzz.state import load_finding
from harness.scenario import codec
from harness.subjects.builtin import BUILTIN

REGRESSIONS = Path("harness/regressions")
FOUND = "found-"
"""Begins the names of these: no class with a planted bug is known for them, as for the others."""

_CAMPAIGN = "campaign.json"
_PLANTED = ("canary-", "museum:")
_BUILT_IN_FOR = {"zero_master": "zero2", "muon": "muon"}


class LeftOutError(Exception):
    """A case that can be no regression test of this repository."""


def regression(case: codec.Case) -> codec.Case:
    """The case as it is to lie in harness/regressions, which must hold for a class that is right: without what it
    showed, and with a built-in subject, which stands in for a class of one's own with its interface.

    Raises:
        LeftOutError: no built-in subject can be told from it; or it shows a bug that is planted.
    """
    named = case.subject
    if named is not None and named.given.startswith(_PLANTED):
        raise LeftOutError("found in a class whose bug is planted")
    if named is not None and named.absolute in BUILTIN:
        kept = codec.SubjectReference(named.absolute, named.absolute, named.args, named.config)
    elif case.scenario.system in _BUILT_IN_FOR:
        built_in = _BUILT_IN_FOR[case.scenario.system]
        kept = codec.SubjectReference(built_in, built_in)
    else:
        raise LeftOutError("of a distribution strategy that is not built in: nothing here is known to stand in for it")
    return msgspec.structs.replace(case, subject=kept, failure=None)


def identity(case: codec.Case) -> str:
    """12 hex digits: equal for cases that run the same on the same subject, whatever they showed."""
    same = msgspec.structs.replace(case, failure=None)
    return hashlib.sha256(codec.encode(same)).hexdigest()[:12]


def collected(places: Iterable[Path], known: Path) -> tuple[dict[str, bytes], Counter[str], list[str]]:
    """What is new in ``places``.

    Args:
        places: directories, as described above; one that is missing holds nothing.
        known: the directory of the regressions that there are.

    Returns:
        The new files by name, how many are left out for what reason, and what could not be read, a line each.
    """
    there = {identity(codec.load(path)) for path in sorted(known.glob("*.json"))}
    files: dict[str, bytes] = {}
    left_out: Counter[str] = Counter()
    damaged: list[str] = []
    for path in _cases(places):
        try:
            case = regression(codec.load(path))
        except LeftOutError as error:
            left_out[str(error)] += 1
            continue
        except CaseError as error:
            damaged.append(str(error))
            continue
        digest = identity(case)
        subject = "" if case.subject is None else case.subject.given
        name = f"{FOUND}{subject.replace('_', '-')}-{digest}.json"
        if digest in there:
            left_out[f"in {known} already"] += 1
        elif name not in files:
            files[name] = codec.encode(case)
    return files, left_out, damaged


def patch(files: dict[str, bytes], directory: Path) -> bytes:
    """A git patch that adds these files to ``directory``, given relative to the root of the repository."""
    parts = []
    for name, data in sorted(files.items()):
        path = f"{directory.as_posix()}/{name}"
        lines = data.decode().removesuffix("\n").split("\n")
        parts += [
            f"diff --git a/{path} b/{path}",
            "new file mode 100644",
            "--- /dev/null",
            f"+++ b/{path}",
            f"@@ -0,0 +1,{len(lines)} @@",
            *(f"+{line}" for line in lines),
            *([] if data.endswith(b"\n") else ["\\ No newline at end of file"]),
        ]
    return "".join(f"{line}\n" for line in parts).encode()


def _cases(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        campaigns = sorted(path.parent for path in place.glob(f"**/{_CAMPAIGN}"))
        for campaign in campaigns:
            for path in sorted((campaign / "findings").glob("*.json")):
                found = load_finding(campaign, path.stem)
                # One that cannot be read is no case either: its name is in the complaint.
                yield path if found is None or found.failure.case is None else Path(found.failure.case)
        if not campaigns:
            yield from sorted(place.glob("case-*.json"))


def main(arguments: list[str]) -> int:
    """Write the patch, or say that there is nothing new; the exit code."""
    if len(arguments) < 2:
        raise UsageError("usage: python -m ci.regressions PATCH DIR...")
    target, places = Path(arguments[0]), [Path(each) for each in arguments[1:]]
    files, left_out, damaged = collected(places, REGRESSIONS)
    for reason, number in left_out.most_common():
        print(f"left out, {number}: {reason}")
    for line in damaged:
        print(f"error: {line}", file=sys.stderr)
    target.unlink(missing_ok=True)
    if files:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(patch(files, REGRESSIONS))
        print(f"{target}: adds {len(files)} to {REGRESSIONS}: {', '.join(sorted(files))}; `git apply {target}`")
    else:
        print(f"no new case in {', '.join(map(str, places))}; no patch is written")
    return 2 if damaged else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"error: {error}")
