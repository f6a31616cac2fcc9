"""
A device kind in torch: its device, and the process group for its tensors.

Imported in workers only. The only file of this folder that imports torch, inside its functions.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pdrun.backends.base import Backend
from pdrun.backends.detect import KINDS
from pdrun.errors import ConfigError
from pdrun.text import plural

if TYPE_CHECKING:
    import torch


def import_torch() -> Any:
    """Return the module torch; ConfigError if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install torch, or init(group=False)"
        raise ConfigError("torch is not installed", where="pdrun.init", hint=hint) from None


def native_backend() -> Backend:
    """Return the device kind that the installed torch can use here: its accelerator, or cpu."""
    torch = import_torch()
    if not torch.accelerator.is_available():
        return KINDS["cpu"]
    kind = str(torch.accelerator.current_accelerator().type)
    if kind == "cuda" and torch.version.hip:
        kind = "rocm"
    return KINDS.get(kind, KINDS["cpu"])


def open_device(backend: Backend, index: int) -> torch.device:
    """
    Make visible device ``index`` the current device and return it.

    If only one device is visible, it is device 0, independent of its index on the node.

    Raises:
        ConfigError: torch does not support the kind, or sees too few devices.
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
            f"torch {torch.__version__} does not support {backend.title} here",
            where="pdrun.init",
            hint="install a build of torch that does, or use --backend cpu",
        )
    if not backend.has_indices:
        return torch.device(backend.torch_device)
    count = module.device_count()
    chosen = 0 if count == 1 else index
    if chosen >= count:
        raise ConfigError(
            f"this worker needs {backend.torch_device}:{index}, but torch sees"
            f" {plural(count, 'device')}",
            where="pdrun.init",
            hint="start fewer workers on this node",
        )
    module.set_device(chosen)
    return torch.device(backend.torch_device, chosen)


def group_backend(backend: Backend, collective: str = "") -> str:
    """
    Return the argument of `init_process_group`: ``gloo``, or ``cpu:gloo,cuda:nccl`` for both kinds.

    Raises:
        ConfigError: the installed torch is built without the collective library, or the library
            is one for other devices.
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
    if collective and wanted.lower() != "gloo":  # gloo is for tensors on the host
        served = dist.Backend.backend_capability.get(wanted.lower())
        if served is not None and backend.torch_device not in served:
            raise ConfigError(
                f"{wanted} is for {', '.join(served)}; this worker has {backend.torch_device}",
                where="pdrun.init",
                hint=f"leave collective out, which is {backend.collective}, or use --backend",
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
    Create torch's default process group.

    Args:
        timeout: seconds that a collective may take; None: torch's default (30 minutes, 10 for
            NCCL).
        store: a torch store; None: MASTER_ADDR and MASTER_PORT (``env://``).
    """
    options: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if store is not None:
        options["store"] = store
    if timeout is not None:
        options["timeout"] = timedelta(seconds=timeout)
    name = group_backend(backend, collective)
    if "nccl" in name:
        # Binds the group to the device: errors are reported early, and no collective must guess it.
        options["device_id"] = device
    import_torch().distributed.init_process_group(name, **options)
