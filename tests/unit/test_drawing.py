"""The thread that draws."""

from __future__ import annotations

import sys

from harness.drawing import SWITCH_INTERVAL_S, Drawer
from harness.scenario import generate


def test_it_draws_what_is_drawn_without_it_and_leaves_the_interpreter_as_it_was() -> None:
    before = sys.getswitchinterval()
    drawer = Drawer()

    drawn = drawer.begin(lambda index: generate.draw(3, index, (2,)), 5)

    assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-5
    assert drawn.result() == generate.draw(3, 5, (2,))
    drawer.close()
    drawer.close()
    assert abs(sys.getswitchinterval() - before) < 1e-5
