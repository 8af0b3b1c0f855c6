"""Whether this machine has the GPUs that a job was promised: ``make gpus GPUS=4``.

``python -m ci.gpus N``. Exit codes: 0: at least N can be used, and are named; 1: fewer.
"""

from __future__ import annotations

import sys

import torch


def main(arguments: list[str]) -> int:
    """Name the GPUs; the exit code."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        sys.exit("usage: python -m ci.gpus N")
    wanted, found = int(arguments[0]), torch.cuda.device_count()
    for index in range(found):
        print(f"cuda:{index}  {torch.cuda.get_device_name(index)}")
    if found < wanted:
        print(
            f"error: {wanted} GPUs are needed, torch {torch.__version__} can use {found}: is this the right runner, "
            "and does its container have --gpus all?",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
