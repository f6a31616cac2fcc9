"""
Offloading: masters and optimizer state on the host, optimizer state in files, activations on the
host, and modules that are computed there.

*Optimizer.* Masters and state are on the host, and the optimizer runs there. Gradients are copied
to the host, new weights back. At level 3 the master is a rank's only copy of its weights: these are
on the host too, and are copied to the device one unit at a time.

*Disk.* After the first step the optimizer's state is moved into memory-mapped files: the system
writes out what does not fit into memory.

*Activations.* What autograd saves is copied to the host, and back before it is needed: when one
tensor is used, those that were saved before it are already being copied. Copies run beside the
computation if the device has streams.

*Modules.* The weights of a module, their gradients and optimizer state are on the host, where the
module computes: its inputs are copied there, and its outputs back. Gradients are summed over the
ranks on the host, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.model.forward_wrapper import Forward, wrap_forward
from pdrun.parallel.model.recompute import match_modules
from pdrun.parallel.model.weights import HOST_MARK

HOST = torch.device("cpu")
PREFETCH_TENSORS = 2
"""Tensors that are fetched while one is used."""


@dataclass(frozen=True)
class Offload:
    """
    What is kept off the device.

    Attributes:
        optimizer: masters and optimizer state (and, at level 3, weights) on the host.
        disk: folder for files with the optimizer's state; each rank makes its own in it.
        activations: what autograd saves on the host.
        least: bytes below which an activation stays.
        modules: a glob or globs of modules that are computed on the host, with their weights,
            gradients and optimizer state.
    """

    optimizer: bool = False
    disk: str | Path | None = None
    activations: bool = False
    least: int = 1 << 20
    modules: str | Sequence[str] = ()

    @property
    def module_globs(self) -> tuple[str, ...]:
        """The globs of ``modules``."""
        return (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)

    def __post_init__(self) -> None:
        globs = self.module_globs if isinstance(self.modules, Sequence) else (None,)
        if not all(isinstance(glob, str) for glob in globs):
            raise UsageError(
                f"modules must be a glob or a list of globs, got {self.modules!r}",
                where="pdrun.Offload",
            )
        if self.disk is not None and not self.optimizer:
            raise UsageError(
                "disk= is for the optimizer's state and requires optimizer=True",
                where="pdrun.Offload",
            )


def parse_offload(value: Any) -> Offload:
    """
    Return the meaning of a user's ``offload``: None, "optimizer", "activations", "all", an Offload,
    or a dict from globs of modules to "host".
    """
    if value is None:
        return Offload()
    if value in ("optimizer", "activations", "all"):
        return Offload(optimizer=value != "activations", activations=value != "optimizer")
    if isinstance(value, Offload):
        return value
    if isinstance(value, Mapping) and value and all(place == "host" for place in value.values()):
        return Offload(modules=tuple(value))
    what = "offload must be 'optimizer', 'activations', 'all', a pdrun.Offload or a dict of"
    what += f" modules, got {value!r}"
    raise UsageError(what, where="pdrun.parallelize", hint='offload={"emb": "host"}')


# ---- modules on the host -----------------------------------------------------


class HostModules:
    """
    The modules of a model that are computed on the host.

    Args:
        model: the full model, before it is moved to its device.
        globs: of the modules.

    Attributes:
        names: of the modules.
        copied_bytes: of inputs and outputs that were given to the host, and back.

    Raises:
        UsageError: a glob matches no module, a weight is used elsewhere too, or a module
            normalises by batches.
    """

    def __init__(self, model: nn.Module, globs: Sequence[str]) -> None:
        self.names = match_modules(model, globs, "offload") if globs else []
        self.modules = [model.get_submodule(name) for name in self.names]
        self.copied_bytes = 0
        inside = {id(part) for module in self.modules for part in module.modules()}
        mine = {
            id(param): f"{name}.{own}"
            for name, module in zip(self.names, self.modules, strict=True)
            for own, param in module.named_parameters()
        }
        for holder, module in model.named_modules():
            if id(module) in inside:
                if isinstance(module, _BatchNorm):
                    what = f"{holder} has statistics of a batch, which are not kept on the host"
                    raise UsageError(what, where="offload", hint="leave it on the device")
                continue
            for own, param in module.named_parameters(recurse=False):
                if id(param) in mine:
                    other = f"{holder}.{own}" if holder else own
                    what = f"{mine[id(param)]} is on the host, and is tied to {other}, which is not"
                    raise UsageError(what, where="offload", hint="name both modules, or none")
        for module in self.modules:
            for param in module.parameters():
                setattr(param, HOST_MARK, True)

    def wrap_forwards(self, device: torch.device) -> None:
        """Have the modules take inputs from a device, and return outputs to it."""
        for module in self.modules:
            wrap_forward(module, partial(self._wrap, module, device))

    def _wrap(self, module: nn.Module, device: torch.device, forward: Forward) -> Forward:
        def copy_to(place: torch.device) -> Callable[[Any], Any]:
            def copy(leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                self.copied_bytes += leaf.numel() * leaf.element_size()
                return leaf.to(place)

            return copy

        def run(*args: Any, **kwargs: Any) -> Any:
            held = next(module.parameters(), None)
            # copies of the model for proofs are on the device as a whole
            home = HOST if held is None else held.device
            args, kwargs = pytree.tree_map(copy_to(home), (args, kwargs))
            return pytree.tree_map(copy_to(device), forward(*args, **kwargs))

        return run


# ---- optimizer state in files -----------------------------------------------


def move_state_to_files(optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """
    Move the optimizer's state into mapped files of a folder, if it is not there yet; return the
    bytes moved.
    """
    moved = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if (
                not isinstance(value, torch.Tensor)
                or value.dim() == 0
                or getattr(value, "_pdrun_file", None)
            ):
                continue
            if not value.numel():
                continue
            path = folder / f"{id(value)}-{key}.bin"
            _reserve_file(path, value.numel() * value.element_size())
            there = torch.from_file(
                str(path), shared=True, size=value.numel(), dtype=value.dtype
            ).view(value.shape)
            there.copy_(value)
            there._pdrun_file = str(path)
            state[key] = there
            path.unlink()  # the mapping stays; no file is left behind if the process is killed
            moved += value.numel() * value.element_size()
    return moved


def _reserve_file(path: Path, size: int) -> None:
    """
    Make a file with allocated disk space: writing to a file without it would kill the process.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        what = f"no space for {size:,} bytes of optimizer state ({error.strerror})"
        raise ConfigError(what, where=str(path.parent)) from None


# ---- activations ------------------------------------------------------------


class _SavedTensor:
    """One saved tensor: on the host, or being copied."""

    def __init__(
        self, among: list[_SavedTensor | None], host: torch.Tensor, device: torch.device, done: Any
    ) -> None:
        self.among = among
        self.index = len(among)
        """The tensors of its forward pass in order, and its index there."""
        self.host = host
        self.device = device
        self.done = done
        self.back: torch.Tensor | None = None
        self.came: Any = None


class ActivationOffload:
    """
    Hooks for autograd that keep what it saves on the host.

    Args:
        least: bytes below which a tensor stays.
        weights: identities of the storages of weights, which stay too.
    """

    def __init__(self, device: torch.device, least: int, weights: set[int]) -> None:
        self._device = device
        self._least = least
        self._weights = weights
        self._module = getattr(torch, device.type) if device.type != "cpu" else None
        self._stream = self._module.Stream() if self._module is not None else None
        self._saved: list[_SavedTensor | None] = []
        self.moved_bytes = 0
        """Bytes copied to the host in the last pass."""

    def saved_tensors_hooks(self) -> AbstractContextManager[Any]:
        """Return the context manager of the forward pass."""
        self._saved = []
        self.moved_bytes = 0
        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            self._pack_tensor, self._unpack_tensor
        )
        return hooks

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        small = size < self._least or not tensor.is_floating_point()
        if (
            small
            or tensor.device != self._device
            or tensor.untyped_storage()._cdata in self._weights
        ):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._module is not None)
        done = None
        if self._module is None or self._stream is None:
            host.copy_(tensor)
        else:
            self._stream.wait_stream(self._module.current_stream())
            with self._module.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
            done = self._stream.record_event()
        saved = _SavedTensor(self._saved, host, tensor.device, done)
        self._saved.append(saved)
        self.moved_bytes += size
        return saved

    def _unpack_tensor(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedTensor):
            return saved
        for index in range(saved.index, max(-1, saved.index - PREFETCH_TENSORS - 1), -1):
            near = saved.among[index]
            if near is not None:
                self._start_fetch(near)
        self._start_fetch(saved)
        saved.among[saved.index] = None
        tensor = saved.back
        saved.back = None
        assert tensor is not None
        if self._module is not None:
            self._module.current_stream().wait_event(saved.came)
            tensor.record_stream(self._module.current_stream())
        return tensor

    def _start_fetch(self, saved: _SavedTensor) -> None:
        """Start to copy a tensor back."""
        if saved.back is not None:
            return
        if self._module is None or self._stream is None:
            saved.back = saved.host
            return
        with self._module.stream(self._stream):
            self._stream.wait_event(saved.done)
            saved.back = saved.host.to(saved.device, non_blocking=True)
            saved.came = self._stream.record_event()
