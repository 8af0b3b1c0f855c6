"""The warm ranks of one test process: started at their first use, kept over tests, ended with the session. No torch."""

from __future__ import annotations

import contextlib
from typing import NoReturn

import pytest

from harness import inputs
from harness.errors import UsageError
from harness.evaluate import Pool, start_pool
from harness.launch.pool import RankPool
from harness.plugin.messages import Setup, encode

HANDLER = "harness.plugin.rank:start"
GRACE_S = 1.0
_KEY = pytest.StashKey["Pools"]()


class Pools:
    """One pool a backend for the bodies of tests, and one a backend for scenarios (:func:`harness.evaluate`)."""

    def __init__(self, config: pytest.Config) -> None:
        self._setup = encode(_setup(config))
        self._nccl_asked_for = config.getoption("--ranks-backend") == "nccl"
        self._bodies: dict[str, RankPool] = {}
        self._scenarios: dict[str, Pool] = {}
        self._refusals: dict[tuple[str, int], str | None] = {}
        self._stack = contextlib.ExitStack()

    def bodies(self, backend: str, world: int) -> RankPool:
        """Ranks that run functions of tests.

        Raises:
            UsageError: this machine has no room for so many.
            PoolError: they cannot be started.
        """
        self._require(backend, world)
        if backend not in self._bodies:
            pool = RankPool(HANDLER, self._setup, backend=backend, preload=["harness.plugin.rank"], grace_s=GRACE_S)
            self._bodies[backend] = self._stack.enter_context(pool)
        return self._bodies[backend]

    def scenarios(self, backend: str, world: int) -> Pool:
        """Ranks, or simulated ones, that run scenarios of any subject.

        Raises:
            UsageError: this machine has no room for so many.
            PoolError: they cannot be started.
        """
        self._require(backend, world)
        if backend not in self._scenarios:
            self._scenarios[backend] = self._stack.enter_context(start_pool(backend))
        return self._scenarios[backend]

    def drop(self, backend: str) -> None:
        """End ranks that could not do their work, for bodies and for scenarios: the next use starts others."""
        for pools in (self._bodies, self._scenarios):
            pool = pools.pop(backend, None)
            if pool is not None:
                pool.__exit__(None, None, None)

    def close(self) -> None:
        """End every process. Idempotent."""
        self._stack.close()

    def _require(self, backend: str, world: int) -> None:
        """What lacks GPUs is skipped, and counted as that; any other refusal is the user's to mend.

        So is that of ``--ranks-backend nccl`` where there is no GPU at all: a run that skips everything would be green.
        """
        refusal = self._refusal(backend, world)
        if refusal is None:
            return
        if backend != "nccl":
            raise UsageError(refusal)
        refusal = refusal.removeprefix("--backend nccl: ").replace("--backend", "--ranks-backend")
        if self._nccl_asked_for and self._refusal(backend, 1) is not None:
            raise UsageError(f"--ranks-backend nccl: {refusal}")
        skip(refusal)

    def _refusal(self, backend: str, world: int) -> str | None:
        """Why this machine does not have such ranks; asked once each."""
        key = (backend, world)
        if key not in self._refusals:
            try:
                inputs.check_backend(backend, (world,))
                self._refusals[key] = None
            except UsageError as error:
                self._refusals[key] = str(error)
        return self._refusals[key]


def of(config: pytest.Config) -> Pools:
    """The pools of this session."""
    if _KEY not in config.stash:
        config.stash[_KEY] = Pools(config)
    return config.stash[_KEY]


def close(config: pytest.Config) -> None:
    """End what this session started."""
    pools = config.stash.get(_KEY, None)
    if pools is not None:
        pools.close()
        del config.stash[_KEY]


def skip(reason: str) -> NoReturn:
    """Skip the test that runs; the summary shows where that is, not where this is."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


def _setup(config: pytest.Config) -> Setup:
    filtered = config.pluginmanager.has_plugin("warnings")  # not with -p no:warnings
    return Setup(
        rootdir=str(config.rootpath),
        import_mode=config.getoption("--import-mode"),
        namespace_packages=bool(config.getini("consider_namespace_packages")),
        assertions=config.getoption("assertmode"),
        python_files=list(config.getini("python_files")),
        verbosity=config.get_verbosity(),
        style=config.getoption("tbstyle"),
        show_locals=bool(config.getoption("showlocals")),
        filters=list(config.getini("filterwarnings")) if filtered else [],
        option_filters=list(config.getoption("pythonwarnings") or ()) if filtered else [],
    )
