"""The pytest plugin: tests whose body runs on every rank of a process group, and ``harness.conformance``.

Installed with the package (entry point ``zero2_harness``). Nothing but pytest and the standard library is imported, and
nothing is started, until a test asks for it. PYTEST_DONT_REWRITE

Which process runs what. Collection, fixtures, parametrisation and reports are the test process's, which joins no
process group. The body of a test with the marker ``ranks`` runs on every rank, in processes that stay warm over tests;
each imports the file of tests, as pytest does, but no conftest.py. What the body takes is pickled: plain data, paths,
classes of the file. Of a test in a class each rank makes an instance of its own, which gets what fixtures had put into
the attributes of the first. What a body changes in its process (random state, environment, loaded modules) is there
for the next test, as in any test run; after a hang, a crash, unequal collectives or a lost process group all processes
of that world are replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from harness.plugin import settings

if TYPE_CHECKING:
    from harness.plugin.bodies import Ranks

_NO_GROUP = "Default process group has not been initialized"  # torch's words


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and ini values, in a group of their own."""
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and refuse wrong options."""
    config.addinivalue_line(
        "markers",
        "ranks(world=2, backend=None, timeout=None): run the body of the test on every rank of a process group of this "
        "world size, or once for each of several sizes; the limit is in seconds",
    )
    settings.check_options(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process that tests have started."""
    if "harness.plugin.pools" in sys.modules:
        from harness.plugin import pools

        pools.close(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Fewer workers for ``-n auto``, where ``ranks_auto_world`` of the ini file asks for it."""
    world = settings.auto_world(config)
    if world is None or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # pytest-xdist reads the variable itself
    return max(1, len(os.sched_getaffinity(0)) // world)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check what the marker is given; of several worlds each is a test of its own."""
    node = metafunc.definition
    if node.get_closest_marker(settings.MARKER) is None:
        return
    problem = settings.misuse(metafunc.function)
    try:
        asked = settings.asked(node.iter_markers(settings.MARKER))
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise pytest.Collector.CollectError(f"{node.nodeid}: {problem}")
    if asked.several:
        metafunc.fixturenames.append(settings.WORLD)
        metafunc.parametrize(settings.WORLD, asked.worlds, indirect=True, ids=[f"world{each}" for each in asked.worlds])


@pytest.fixture
def _ranks_world(request: pytest.FixtureRequest) -> int:
    """The world of a test of several."""
    return int(request.param)


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Ranks:
    """Runs functions on ranks: ``ranks(function, *args, world=3)`` returns what each of them returned.

    In the body of a test with the marker ``ranks`` it is the rank itself: ``ranks.rank``, ``ranks.world``,
    ``ranks.device``, ``ranks.backend``.
    """
    from harness.plugin.bodies import Ranks

    return Ranks(pytestconfig)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which test runs, for what it asks of ranks; the marker on what it means nothing for is a mistake."""
    unittest = sys.modules.get("unittest")
    if unittest is not None and item.get_closest_marker(settings.MARKER) is not None:
        cls = getattr(item, "cls", None)
        if cls is not None and issubclass(cls, unittest.TestCase):
            pytest.fail("a unittest.TestCase cannot run on ranks: use a plain class or function", pytrace=False)
    if "ranks" in getattr(item, "fixturenames", ()):
        from harness.plugin.bodies import CURRENT

        item.config.stash[CURRENT] = item


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run the body of a marked test on its ranks."""
    if pyfuncitem.get_closest_marker(settings.MARKER) is None:
        return None
    from harness.plugin.bodies import run_test

    run_test(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what torch cannot know: a body without the marker runs in the test process, which is in no group."""
    report = yield
    forgotten = "ranks" in getattr(item, "fixturenames", ()) and item.get_closest_marker(settings.MARKER) is None
    if report.failed and forgotten and call.excinfo is not None and _NO_GROUP in str(call.excinfo.value):
        hint = "the body ran in the test process, which is in no process group: mark the test with"
        report.sections.append(("ranks", f"{hint} @pytest.mark.{settings.MARKER}(world=2), to run it on every rank"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> pytest.Collector | None:
    """Collect what ``harness.conformance`` returned, under whatever name the module has it."""
    if "harness.plugin.battery" not in sys.modules:
        return None
    from harness.plugin.battery import Conformance

    if not isinstance(obj, Conformance):
        return None
    from harness.plugin.items import Battery

    return Battery.from_parent(collector, name=name, conformance=obj)


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """With ``--ranks-scenario``, and no battery to run the case in: run it over the subject that it names."""
    given = session.config.getoption("--ranks-scenario")
    if given is None:
        return
    from harness.plugin.items import ScenarioItem, alone

    if not any(isinstance(item, ScenarioItem) for item in items):
        items.append(alone(session, given))
