"""
The torch side of a device kind: its device, and the process group that moves its tensors.

Loaded in workers only; this is the one file of the floor that imports torch, and only inside its
functions.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pdrun.backends.base import Backend
from pdrun.backends.detect import KINDS
from pdrun.errors import ConfigError

if TYPE_CHECKING:
    import torch


def import_torch() -> Any:
    """Return the module torch; ConfigError where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install torch, or init(group=False)"
        raise ConfigError("torch is not installed", where="pdrun.init", hint=hint) from None


def native_backend() -> Backend:
    """
    Return the kind of device that the installed torch can use here: its accelerator, or the CPU.
    """
    torch = import_torch()
    if not torch.accelerator.is_available():
        return KINDS["cpu"]
    kind = str(torch.accelerator.current_accelerator().type)
    if kind == "cuda" and torch.version.hip:
        kind = "rocm"
    return KINDS.get(kind, KINDS["cpu"])


def open_device(backend: Backend, index: int) -> torch.device:
    """
    Make device ``index`` of those that this process sees the current one and return it.

    A process that sees one device only has device 0, whatever its index on the node.

    Raises:
        ConfigError: torch cannot use the kind, or sees too few devices.
    """
    torch = import_torch()
    if backend.plugin:
        try:
            importlib.import_module(backend.plugin)
        except ModuleNotFoundError:
            raise ConfigError(
                f"{backend.name} needs the package {backend.plugin}", where="pdrun.init"
            ) from None
    if backend.name == "cpu":
        return torch.device("cpu")
    module = getattr(torch, backend.torch_device, None)
    if module is None or not module.is_available():
        raise ConfigError(
            f"torch {torch.__version__} cannot use {backend.title} here",
            where="pdrun.init",
            hint="install a build of torch with it, or choose --backend cpu",
        )
    if not backend.has_indices:
        return torch.device(backend.torch_device)
    count = module.device_count()
    chosen = 0 if count == 1 else index
    if chosen >= count:
        raise ConfigError(
            f"this worker should use {backend.torch_device}:{index}, but torch sees {count} device(s)",
            where="pdrun.init",
            hint="start fewer workers on this node",
        )
    module.set_device(chosen)
    return torch.device(backend.torch_device, chosen)


def group_backend(backend: Backend, collective: str = "") -> str:
    """
    Return what `init_process_group` takes: ``gloo``, or ``cpu:gloo,cuda:nccl`` so that tensors of
    both kinds travel.

    Raises:
        ConfigError: the installed torch lacks the collective; names it.
    """
    torch = import_torch()
    dist = torch.distributed
    wanted = collective or backend.collective
    if not dist.is_available():
        raise ConfigError(
            f"torch {torch.__version__} is built without torch.distributed", where="pdrun.init"
        )
    if not dist.is_backend_available(wanted.lower()):
        raise ConfigError(
            f"torch {torch.__version__} is built without {wanted}", where="pdrun.init"
        )
    if backend.torch_device == "cpu" or wanted == "gloo" or not dist.is_backend_available("gloo"):
        return wanted
    return f"cpu:gloo,{backend.torch_device}:{wanted}"


def open_group(
    backend: Backend,
    collective: str,
    device: torch.device,
    rank: int,
    world_size: int,
    timeout: float | None,
    store: Any,
) -> None:
    """
    Make torch's default process group; `store` is a torch store, or None for MASTER_ADDR and
    MASTER_PORT (``env://``).

    Args:
        timeout: seconds that a collective may take; None leaves torch's own (30 minutes, 10 for
            NCCL).
    """
    options: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if store is not None:
        options["store"] = store
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    name = group_backend(backend, collective)
    if "nccl" in name:
        options["device_id"] = (
            device  # ties the group to the device: errors show at once, and no collective guesses
        )
    import_torch().distributed.init_process_group(name, **options)
