"""The command line: a module for each verb, what they share in `options` and `running`."""

from harness.cli.command import main

__all__ = ["main"]
