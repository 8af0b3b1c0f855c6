"""Saved cases with bytes changed at random, and what the command line must answer to each of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from harness import cli, runner
from harness.faults.language import Corrupt, Delay, Raise
from harness.launch.pool import RankPool
from harness.scenario import codec, generate
from harness.scenario.codec import Case, SubjectReference
from harness.scenario.model import AdamW, Build, Domain, Parameter, Part, Scenario, Step, Values
from harness.verdict import Stage

SUBJECT = """
from zero2core import ZeroMaster

class Forgets(ZeroMaster):
    def gather_params(self):
        pass
"""

_FAULTY = Scenario(
    world=2,
    seed=5,
    parameters=(Parameter("a", (3, 4)), Parameter("b", ())),
    values=Values(Domain.EXACT, max_k=255, exponent=-3),
    optimizer=AdamW(),
    operations=(Build(4), Part(False, (0, 1), ((), (1,))), Step()),
    faults=(
        Delay(rank=0, step=0, stage=Stage.GATHER, collective=0, milliseconds=5),
        Raise(rank=1, step=0, stage=Stage.UPDATE),
    ),
)
_CORRUPT = msgspec.structs.replace(_FAULTY, faults=(Corrupt(rank=1, step=0, stage=Stage.REDUCE, collective=0),))


def saved_cases(directory: Path) -> list[bytes]:
    """Files as campaigns save them: drawn ones, with a subject in ``directory`` and without, with faults, violated."""
    (directory / "forgets.py").write_text(SUBJECT)
    own = SubjectReference("forgets.py:Forgets", f"{directory / 'forgets.py'}:Forgets")
    zero2 = SubjectReference("zero2", "zero2")
    failure = {"property": "gradient", "step": 0, "message": "two\nlines", "expected": -50.0, "ulps": 1234}
    drawn = [generate.draw(3, index, (1, 2, 3)) for index in range(4)]
    return [
        *(codec.encode(Case(scenario)) for scenario in drawn),
        codec.encode(Case(drawn[0], zero2, failure)),
        codec.encode(Case(drawn[3], own, failure)),
        codec.encode(Case(_FAULTY, zero2)),
        codec.encode(Case(_CORRUPT)),
    ]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three random edits. No run of digits grows by more than one, so that what stays valid stays small."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        _edit(changed, rng)
    return bytes(changed)


def _edit(data: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(data))
    other = min(place + rng.randint(1, 40), len(data))
    match rng.choice(("flip", "insert", "delete", "swap", "digit", "repeat", "cut")):
        case "flip":
            data[place] ^= 1 << rng.randrange(8)
        case "insert":
            data.insert(place, rng.choice((*b'0123456789-{}[],:"\\ .eE\x00\xff', rng.randrange(256))))
        case "delete":
            del data[place:other]
        case "swap":
            far = rng.randrange(len(data))
            low, high = sorted((place, far))
            width = min(rng.randint(1, 20), high - low, len(data) - high)
            data[low : low + width], data[high : high + width] = data[high : high + width], data[low : low + width]
        case "digit":
            digits = [index for index, byte in enumerate(data) if byte in b"0123456789"]
            if digits:
                data[rng.choice(digits)] = rng.choice(b"0123456789")
        case "repeat":
            line = bytes(data[place:other])
            if not line.isdigit():
                data[place:place] = line
        case "cut" if rng.random() < 0.2:
            del data[place:]
        case _:
            pass


def mutated_cases(directory: Path, count: int, seed: int) -> Iterator[Path]:
    """So many files, one after the other, in ``directory``, which must be the current one for their subjects' sake."""
    rng = random.Random(seed)
    originals = saved_cases(directory)
    path = directory / "mutated.json"
    for index in range(count):
        path.write_bytes(mutated(originals[index % len(originals)], rng))
        yield path


def check_answer(code: int, printed: str, complained: str) -> None:
    """A refusal of one line before anything else; or a verdict. Never a traceback of the harness.

    What only ranks can find out about a subject is said after the line that names the case. Where the subject raised,
    its own traceback is part of what its rank said.
    """
    everything = printed + complained
    assert "Traceback" not in "".join(line for line in everything.splitlines() if not line.startswith("    | "))
    assert all(char.isprintable() or char == "\n" for char in everything)
    lines = printed.splitlines()
    assert not lines or lines[0].startswith("replaying ")
    if code == 2:
        assert complained.startswith("error: ")
        assert complained.count("\n") == 1
        assert len(lines) <= 1
    else:
        assert lines[1].startswith({0: "holds: ", 1: "violated: ", 3: "unknown: "}[code])


def replay_in_process(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], int]:
    """The command line in this process, on ranks that stay warm; its answer is checked, its exit code returned."""
    monkeypatch.setattr(runner, "replay_case", partial(runner.replay_case, pool=pool))

    def replay(path: Path) -> int:
        code = cli.main(["replay", str(path), "--timeout", "120"])
        captured = capsys.readouterr()
        check_answer(code, captured.out, captured.err)
        return code

    return replay


def check_mutations(replay: Callable[[Path], int], directory: Path, count: int, seed: int) -> Counter[int]:
    """Replay so many mutated cases; how often each exit code came. A failure names the file, which is kept."""
    codes: Counter[int] = Counter()
    for index, path in enumerate(mutated_cases(directory, count, seed)):
        try:
            codes[replay(path)] += 1
        except BaseException as error:
            error.add_note(f"mutated case {index} of seed {seed}: {path.read_bytes()!r}")
            raise
    return codes
