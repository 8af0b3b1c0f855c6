"""Which driver carries out the scenarios of a system."""

from __future__ import annotations

from harness.drive.calls import RankDriver
from harness.drive.driver import Driver
from harness.drive.muon import MuonDriver
from harness.drive.strategy import StrategyDriver
from harness.scenario.model import System

_DRIVERS: dict[System, type[RankDriver]] = {"zero_master": Driver, "muon": MuonDriver, "strategy": StrategyDriver}


def driver_of(system: System) -> type[RankDriver]:
    """The class that drives a scenario of this system."""
    return _DRIVERS[system]
