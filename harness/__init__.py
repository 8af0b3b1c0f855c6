"""Prove a sharded optimizer equal to the unsharded trainer, bit for bit, over generated scenarios.

Importing this package imports nothing else: neither torch nor any of its own parts.
"""

__version__ = "0.1.0"
