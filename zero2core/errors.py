"""What this package raises beyond ``ValueError``. Every class also is the built-in it specialises."""

from __future__ import annotations

__all__ = ["GradientStateError", "RankMismatchError", "SimulationError", "Zero2Error"]


class Zero2Error(Exception):
    """Base of the errors below."""


class RankMismatchError(Zero2Error, ValueError):
    """Ranks of one group were given different arguments.

    Raised on every rank of the group, with the first difference. Continuing would pair collectives of unlike
    lengths: garbage without an error, or a dead process.
    """


class GradientStateError(Zero2Error, RuntimeError):
    """A method was called in a state in which its answer would be old or empty.

    Raised before anything is communicated and without changing anything.
    """


class SimulationError(Zero2Error, RuntimeError):
    """A simulated rank (``sim_world``) was asked for what only the other ranks know."""
