"""Prove a sharded optimizer equal to the unsharded trainer, bit for bit, over generated scenarios.

Importing this package imports nothing else, neither torch nor any of its own parts, until one of its functions is asked
for.
"""

TYPE_CHECKING = False  # of typing, which is not imported: `python -m` puts the current directory before it
if TYPE_CHECKING:
    from harness.checking import check_case
    from harness.plugin.battery import conformance

__all__ = ["__version__", "check_case", "conformance"]
__version__ = "0.1.0"

_HOMES = {"check_case": "harness.checking", "conformance": "harness.plugin.battery"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
