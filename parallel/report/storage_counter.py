"""Bytes of the storages that operators create, at each moment and at most."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class StorageCounter(TorchDispatchMode):
    """
    Counts the bytes of all storages that operators create: ``now``, and the maximum, ``peak``.

    Attributes:
        reserved: bytes of `reserve`, part of ``now``; ``reserved_at_peak`` of them at the maximum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.reserved = self.reserved_at_peak = 0
        self._known: dict[int, Any] = {}
        self._is_paused = False

    def reserve(self, nbytes: int) -> None:
        """Count bytes that no operator creates; a negative number frees them."""
        self.reserved += nbytes
        self._add(nbytes)

    def uncounted(self, call: Callable[[], Any]) -> Any:
        """Call a function whose tensors do not count."""
        self._is_paused = True
        try:
            return call()
        finally:
            self._is_paused = False

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.reserved_at_peak = self.now, self.reserved

    def ignore_existing(self, tensors: Any) -> None:
        """Do not count the storages of these tensors."""
        for tensor in tensors:
            self._known[id(tensor.untyped_storage())] = tensor.untyped_storage()

    def is_existing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage existed before."""
        return self._known.get(id(tensor.untyped_storage())) is not None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count_storage(leaf.untyped_storage())
        return result

    def _count_storage(self, storage: Any) -> None:
        key = id(storage)
        size = storage.nbytes()
        if key in self._known:
            return
        self._known[key] = None
        self._add(size)
        weakref.finalize(storage, self._on_freed, key, size)

    def _on_freed(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size
