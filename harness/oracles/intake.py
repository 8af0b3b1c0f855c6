"""What a rank must say about the gradients it has taken in: ``has_grad``, ``spills`` and the path they are on.

A model of zero_master.md ("Gradients") for one rank, without any tensor.
"""

from __future__ import annotations

import enum


class Path(enum.Enum):
    """Where the gradients that wait on a rank are.

    NOTHING: no gradient waits; ``has_grad`` is false.
    HELD: one part waits, announced as the last; autograd's own tensors are kept, nothing was copied.
    SPILLED: one or more parts wait as a sum on the host; the move counted once in ``spills``.
    """

    NOTHING = "nothing"
    HELD = "held"
    SPILLED = "spilled"


class IntakeModel:
    """One rank's intake. ``path`` is where its gradients wait, ``spills`` how often a step's sum moved to the host."""

    def __init__(self) -> None:
        self.path = Path.NOTHING
        self.spills = 0

    @property
    def has_grad(self) -> bool:
        """A gradient waits on this rank, on the device or on the host."""
        return self.path is not Path.NOTHING

    def part(self, more: bool, any_gradient: bool) -> None:
        """``collect(more)`` was called; ``any_gradient``: at least one parameter had a gradient.

        A part without any gradient is no part, whatever it announces. What is held when another part follows joins it
        on the host, also when it had been announced as the last.
        """
        if not any_gradient or self.path is Path.SPILLED:
            return
        if self.path is Path.NOTHING and not more:
            self.path = Path.HELD
        else:
            self.path = Path.SPILLED
            self.spills += 1

    def reduce(self) -> None:
        """``reduce_scatter()`` was called: what was waiting is consumed."""
        self.path = Path.NOTHING

    def discard(self) -> None:
        """``discard()`` was called: what was waiting is forgotten; a spill that happened stays counted."""
        self.path = Path.NOTHING
