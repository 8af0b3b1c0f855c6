"""What the marker and the options take, where each may come from, and what a mistake in them says."""

from __future__ import annotations

import sys

import pytest

from harness import pytest_plugin
from harness.errors import UsageError
from harness.plugin import settings
from harness.plugin.settings import Asked


def _asked(*markers: pytest.Mark) -> Asked:
    return settings.asked(markers)


def _mark(*args: object, **kwargs: object) -> pytest.Mark:
    return pytest.Mark("ranks", args, kwargs, _ispytest=True)  # pytest.mark would want it registered here


def test_the_closest_marker_that_has_an_argument_counts() -> None:
    assert _asked(_mark()) == Asked((2,))
    assert _asked(_mark(timeout=5), _mark(world=3, timeout=9)) == Asked((3,), timeout_s=5.0)
    assert _asked(_mark(4, backend="nccl")) == Asked((4,), backend="nccl")
    assert _asked(_mark(world=(3, 2))) == Asked((3, 2), several=True)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (_mark(world=0), "ranks(world=0): expected a whole number from 1 to 256, or several"),
        (_mark(world="two"), "world='two'"),
        (_mark(world=True), "world=True"),
        (_mark(world=()), "at least one world"),
        (_mark(world=(2, 2)), "each once"),
        (_mark(2, 3), "at most one argument without a name"),
        (_mark(2, world=3), "given twice"),
        (_mark(size=3), "no argument 'size', expected world, backend, timeout"),
        (_mark(backend="mpi"), "expected one of gloo, nccl, got 'mpi'"),
        (_mark(timeout=-1), "expected a number of seconds above zero, got -1"),
        (_mark(timeout="soon"), "got 'soon'"),
    ],
)
def test_a_wrong_argument_is_named(mark: pytest.Mark, said: str) -> None:
    with pytest.raises(ValueError, match="ranks") as raised:
        _asked(mark)
    assert said in str(raised.value)


def test_mistakes_are_told_at_collection(plugin: pytest.Pytester) -> None:
    plugin.makepyfile(
        test_marker="import pytest\n@pytest.mark.ranks(size=3)\ndef test_a(): pass\n",
        test_async="import pytest\n@pytest.mark.ranks\nasync def test_b(): pass\n",
        test_drawn="""
            import pytest
            from hypothesis import given, strategies as st
            @pytest.mark.ranks
            @given(st.integers())
            def test_c(n): pass
            """,
    )
    result = plugin.runpytest_inprocess("--strict-markers", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        [
            "*test_async.py::test_b: an async function cannot run on ranks*",
            "*test_drawn.py::test_c: each rank would draw examples of its own*",
            "*test_marker.py::test_a: ranks(size=3): no argument 'size', expected world, backend, timeout",
        ]
    )


def test_a_unittest_case_is_refused(plugin: pytest.Pytester) -> None:
    plugin.makepyfile(
        """
        import pytest, unittest

        class TestIt(unittest.TestCase):
            @pytest.mark.ranks
            def test_a(self):
                pass
        """
    )
    result = plugin.runpytest_inprocess("-p", "no:xdist")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["a unittest.TestCase cannot run on ranks*"])


def test_options_come_before_the_environment_and_that_before_the_ini_file(
    plugin: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.makeini("[pytest]\nranks_timeout = 7\nranks_backend = gloo\n")

    def seconds(*args: str) -> float | None:
        return settings.timeout_s(plugin.parseconfig(*args))

    assert seconds() == 7.0
    assert settings.backend(plugin.parseconfig()) == "gloo"
    monkeypatch.setenv("PYTEST_RANKS_TIMEOUT", "8")
    assert seconds() == 8.0
    assert seconds("--ranks-timeout", "9") == 9.0


@pytest.mark.parametrize(
    ("ini", "variable", "args", "said"),
    [
        ("", None, ["--ranks-backend=mpi"], "--ranks-backend: expected one of gloo, nccl, got 'mpi'"),
        (
            "",
            "soon",
            [],
            "PYTEST_RANKS_TIMEOUT in the environment: expected a number of seconds above zero, got 'soon'",
        ),
        ("ranks_timeout = -3", None, [], "ranks_timeout in tox.ini: expected a number of seconds above zero, got -3.0"),
        ("ranks_timeout = soon", None, [], "ranks_timeout in tox.ini: *soon*"),
        ("ranks_backend = mpi", None, [], "ranks_backend in tox.ini: expected one of gloo, nccl, got 'mpi'"),
        ("ranks_auto_world = 0", None, [], "ranks_auto_world in tox.ini: expected a whole number above zero, got 0"),
    ],
)
def test_a_wrong_option_is_named_with_where_it_comes_from(
    plugin: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    ini: str,
    variable: str | None,
    args: list[str],
    said: str,
) -> None:
    plugin.makeini(f"[pytest]\n{ini}\n")
    if variable is not None:
        monkeypatch.setenv("PYTEST_RANKS_TIMEOUT", variable)
    result = plugin.runpytest_inprocess(*args, "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


@pytest.mark.parametrize(
    ("marker", "args", "ends"),
    [("ranks", ["--ranks-backend=nccl"], {"failed": 1}), ("ranks(backend='nccl')", [], {"skipped": 1})],
)
def test_gpus_that_are_asked_for_and_that_there_are_none_of(
    plugin: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, marker: str, args: list[str], ends: dict[str, int]
) -> None:
    """By the option: a run that skips everything would be green. By a test's own marker: it is skipped."""

    def none(backend: str, worlds: object, device: object = None) -> None:
        raise UsageError("--backend nccl: no GPU here; use --backend gloo")

    monkeypatch.setattr("harness.inputs.check_backend", none)
    plugin.makepyfile(f"import pytest\n\n\n@pytest.mark.{marker}\ndef test_it():\n    pass\n")
    result = plugin.runpytest_inprocess(*args, "-rs", "-p", "no:xdist")
    result.assert_outcomes(**ends)
    result.stdout.fnmatch_lines(["*no GPU here; use --ranks-backend gloo*"])


def test_the_number_of_workers_is_changed_only_where_the_ini_file_says_so(
    plugin: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)

    def said() -> int | None:
        return pytest_plugin.pytest_xdist_auto_num_workers(plugin.parseconfig())

    assert said() is None
    plugin.makeini("[pytest]\nranks_auto_world = 4\n")
    assert said() == 2
    config = plugin.parseconfig()
    assert config.hook.pytest_xdist_auto_num_workers(config=config) == 2
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert said() is None


def test_a_suite_that_asks_for_nothing_starts_and_imports_nothing(plugin: pytest.Pytester) -> None:
    plugin.makepyfile(
        """
        import sys

        def test_nothing_was_loaded():
            heavy = {"torch", "hypothesis", "numpy", "msgspec", "click", "harness.plugin.bodies", "harness.launch"}
            assert not heavy & set(sys.modules)
            assert "harness.pytest_plugin" in sys.modules
        """
    )
    result = plugin.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:timeout")
    result.assert_outcomes(passed=1)
    assert "ranks" not in result.stdout.str()
    assert sys.modules  # this process is another one
