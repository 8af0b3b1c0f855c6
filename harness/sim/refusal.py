"""What real ranks can do and a simulated world cannot: said with a sentence, and remembered whatever is made of it."""

from __future__ import annotations

HINT = "verify this class with --backend gloo"

_said: list[str] = []


class Refused(RuntimeError):  # noqa: N818 (not wrong, only not possible here)
    """Raised where a rank asks for it. A class may catch it: the world has taken note."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        _said.append(sentence)


def begin() -> None:
    """A run begins; there is one at a time in a process."""
    _said.clear()


def said() -> tuple[str, ...]:
    """All that was refused since, each sentence once."""
    return tuple(dict.fromkeys(_said))
