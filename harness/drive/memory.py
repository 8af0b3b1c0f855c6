"""What a subject keeps alive: storages of live tensors, counted once each; and gradients it should have let go."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Step counters, the norm's scalar, digests: small tensors that no formula names. Measured: 500 bytes on a rank at most,
# whatever the scenario.
_SMALL_BYTES = 2048


class HandedOver:
    """The storages of the gradients of one step, referred to weakly."""

    def __init__(self) -> None:
        self._storages: list[Any] = []

    def add(self, gradient: Tensor) -> None:
        """Watch a gradient's storage, if it has any bytes."""
        storage = gradient.untyped_storage()
        if storage.nbytes():
            self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._storages)

    def still_alive(self) -> int:
        """How many of them are still in memory, once garbage in reference cycles is gone."""
        alive = sum(not storage.expired() for storage in self._storages)
        if alive:
            gc.collect()
            alive = sum(not storage.expired() for storage in self._storages)
        return alive


class LiveMemory:
    """Bytes of storage that came alive since this object was made."""

    def __init__(self) -> None:
        # Referred to weakly: of a storage that is gone by the end, another one may have the address.
        found = _live_storages().items()
        self._before: list[tuple[int, Any]] = [(address, StorageWeakRef(storage)) for address, storage in found]  # type: ignore[no-untyped-call]

    def since(self, apart_from: Iterable[Tensor], addresses: Set[int] = frozenset(), limit: int | None = None) -> int:
        """Bytes in storages that did not exist at the start and do not belong to ``apart_from`` (or are at these).

        Where they are more than ``limit``, once garbage in reference cycles is gone.
        """
        kept = tuple(apart_from)
        alive = self._since(kept, addresses)
        if limit is not None and alive > limit:
            gc.collect()
            alive = self._since(kept, addresses)
        return alive

    def _since(self, apart_from: Iterable[Tensor], addresses: Set[int]) -> int:
        before = {address for address, storage in self._before if not storage.expired()}
        excluded = before | addresses | {tensor.untyped_storage().data_ptr() for tensor in apart_from}
        return sum(storage.nbytes() for address, storage in _live_storages().items() if address not in excluded)


def static_bytes_limit(*, shard_len: int, numel: int, largest_bucket: int, spilled: bool, num_moments: int = 2) -> int:
    """Upper limit of what ZeroMaster may keep on one rank between steps, in bytes (``spec/zero_master.md``).

    16 bytes for each element of the shard (master, gradient, two moments; 20 with a third), two buckets of fp32
    staging, and after a spill the host vector of N fp32 elements.
    """
    return 4 * (2 + num_moments) * shard_len + 2 * 4 * largest_bucket + (4 * numel if spilled else 0) + _SMALL_BYTES


def _live_storages() -> dict[int, Any]:
    """By address, each storage that a Python-visible tensor refers to."""
    found: dict[int, Any] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:  # others have no storage
            storage = thing.untyped_storage()
            if storage.device.type == "meta":
                continue  # what DTensor keeps to work out shapes has no memory
            try:
                found[storage.data_ptr()] = storage
            except RuntimeError:
                continue  # of a wrapper, as a DTensor is: its memory is that of the tensor in it
    return found
