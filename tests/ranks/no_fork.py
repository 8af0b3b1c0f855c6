"""Preloaded where no process can be forked, as at a limit on their number."""

import errno
import os
from typing import NoReturn


def _refuse() -> NoReturn:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


os.fork = _refuse
