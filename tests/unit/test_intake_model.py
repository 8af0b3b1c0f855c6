"""The intake model against a table written by hand from zero_master.md ("Gradients").

``h``: ``collect(False)`` with a gradient, ``m``: ``collect(True)`` with one; ``0``: ``collect(False)`` with none,
``1``: ``collect(True)`` with none; ``r``: reduce, ``d``: discard. The second column has the path after each letter
(``.`` nothing, ``H`` held, ``S`` spilled), the third the number of spills at the end.
"""

from __future__ import annotations

import itertools

import pytest

from harness.oracles.intake import IntakeModel, Path

PATHS = {Path.NOTHING: ".", Path.HELD: "H", Path.SPILLED: "S"}

# Every sequence of up to two parts, then reduce or discard, then what a new step does.
TABLE = [
    ("h", "H", 0),
    ("m", "S", 1),
    ("0", ".", 0),
    ("1", ".", 0),
    # two parts, the first announced as the last
    ("hh", "HS", 1),
    ("hm", "HS", 1),
    ("h0", "HH", 0),
    ("h1", "HH", 0),
    # two parts, the first announcing more
    ("mh", "SS", 1),
    ("mm", "SS", 1),
    ("m0", "SS", 1),
    ("m1", "SS", 1),
    # a first part without any gradient is no part
    ("0h", ".H", 0),
    ("0m", ".S", 1),
    ("00", "..", 0),
    ("01", "..", 0),
    ("1h", ".H", 0),
    ("1m", ".S", 1),
    ("10", "..", 0),
    ("11", "..", 0),
    # three parts: one spill a step at most
    ("mmh", "SSS", 1),
    ("hhh", "HSS", 1),
    ("h0h", "HHS", 1),
    ("1h1", ".HH", 0),
    # consumed: nothing waits, spills stay; the next step counts anew
    ("hr", "H.", 0),
    ("mr", "S.", 1),
    ("0r", "..", 0),
    ("mrm", "S.S", 2),
    ("mrh", "S.H", 1),
    ("hrh", "H.H", 0),
    ("hrm", "H.S", 1),
    ("hhrhh", "HS.HS", 2),
    # forgotten: a spill that happened is not taken back
    ("hd", "H.", 0),
    ("md", "S.", 1),
    ("0d", "..", 0),
    ("mdm", "S.S", 2),
    ("mdh", "S.H", 1),
    ("hdh", "H.H", 0),
    ("hdm", "H.S", 1),
]


def run(letters: str, model: IntakeModel | None = None) -> tuple[str, IntakeModel]:
    model = model or IntakeModel()
    paths = ""
    for letter in letters:
        if letter == "r":
            model.reduce()
        elif letter == "d":
            model.discard()
        else:
            model.part(more=letter in "m1", any_gradient=letter in "hm")
        paths += PATHS[model.path]
        assert model.has_grad == (paths[-1] != ".")
    return paths, model


@pytest.mark.parametrize(("letters", "paths", "spills"), TABLE)
def test_the_table(letters: str, paths: str, spills: int) -> None:
    seen, model = run(letters)

    assert (seen, model.spills) == (paths, spills)


def test_the_table_has_every_sequence_of_at_most_two_parts() -> None:
    written = {letters for letters, _, _ in TABLE}

    assert {"".join(parts) for size in (1, 2) for parts in itertools.product("hm01", repeat=size)} <= written


def test_longer_sequences_follow_from_their_parts_with_gradients() -> None:
    """All sequences of up to six operations: parts without a gradient can be left out, and a step spills when it has a
    part with a gradient that announces more, or two parts with gradients.
    """
    for size in range(1, 7):
        for chosen in itertools.product("hm0rd", repeat=size):
            letters = "".join(chosen)
            paths, model = run(letters)
            _, without = run(letters.replace("0", ""))
            steps = letters.replace("0", "").replace("d", "r").split("r")
            assert model.spills == without.spills == sum("m" in step or len(step) > 1 for step in steps)
            assert (paths[-1] == ".") == (steps[-1] == "")


class NeverSpills(IntakeModel):
    def part(self, more: bool, any_gradient: bool) -> None:
        super().part(False, any_gradient and not self.has_grad)


class SpillsWhatIsEmpty(IntakeModel):
    def part(self, more: bool, any_gradient: bool) -> None:
        super().part(more, True)


class TakesSpillsBack(IntakeModel):
    def discard(self) -> None:
        super().discard()
        self.spills = 0


class KeepsWhatWasReduced(IntakeModel):
    def reduce(self) -> None:
        pass


class SpillsOncePerPart(IntakeModel):
    def part(self, more: bool, any_gradient: bool) -> None:
        self.spills += self.path is Path.SPILLED
        super().part(more, any_gradient)


@pytest.mark.parametrize(
    "wrong", [NeverSpills, SpillsWhatIsEmpty, TakesSpillsBack, KeepsWhatWasReduced, SpillsOncePerPart]
)
def test_the_table_tells_a_wrong_model(wrong: type[IntakeModel]) -> None:
    """A model with one planted mistake disagrees with the table somewhere: the table is sharp enough."""
    agreed = []
    for letters, paths, spills in TABLE:
        seen, model = run(letters, wrong())
        agreed.append((seen, model.spills) == (paths, spills))

    assert not all(agreed)
