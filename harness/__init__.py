"""Prove a sharded optimizer equal to the unsharded trainer, bit for bit, over generated scenarios.

Importing this package imports nothing else, neither torch nor any of its own parts, until ``check_case`` is asked for.
"""

TYPE_CHECKING = False  # of typing, which is not imported: `python -m` puts the current directory before it
if TYPE_CHECKING:
    from harness.checking import check_case

__all__ = ["__version__", "check_case"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "check_case":
        import importlib

        return importlib.import_module("harness.checking").check_case
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
