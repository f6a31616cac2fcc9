"""Checks of environment variables that contradict each other, or this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdrun.backends.affinity import read_cpus
from pdrun.backends.base import ProbeEnvironment
from pdrun.launcher.common.network import is_loopback, list_addresses
from pdrun.launcher.doctor.finding import Finding

INTERFACE_VARIABLES = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HCCL_SOCKET_IFNAME",
)
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs of a node exchange data through the host",
    "NCCL_SHM_DISABLE": "GPUs of a node exchange data through the network",
    "TORCH_SHOW_CPP_STACKTRACES": "errors collect stacks",
    "ASCEND_LAUNCH_BLOCKING": "every kernel is waited for",
    "PYTHONMALLOC": "every allocation is checked",
}
"""Variable -> what it does while it is set to something other than 0."""
RENAMED_VARIABLES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
"""Old name -> the one that torch reads now."""
WORKER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RUNTIME_LIBRARIES = ("libnccl.so.2", "libcudart.so.12", "libcudart.so.13", "libtorch.so")


def check_variables(here: ProbeEnvironment) -> Iterator[Finding]:
    """Check all variables."""
    found = [
        *_check_interfaces(here),
        *_check_worker_variables(here),
        *_check_pairs(here),
        *_check_threads(here),
        *_check_libraries(here),
    ]
    yield from found
    if not found:
        yield Finding("variables", "ok", "no contradictions")


def _check_interfaces(here: ProbeEnvironment) -> Iterator[Finding]:
    """Yield variables that name interfaces which this machine does not have."""
    known = {path.name for path in (here.root / "sys/class/net").glob("*")}
    known |= {name for name, _ in list_addresses()}
    for variable in INTERFACE_VARIABLES:
        text = here.environ.get(variable, "")
        if not text or not known:
            continue
        is_exclusion = text.startswith("^")
        is_exact = text.lstrip("^").startswith("=") or variable == "GLOO_SOCKET_IFNAME"
        names = [name for name in text.lstrip("^").lstrip("=").split(",") if name]
        for name in names:
            fits = name in known if is_exact else any(own.startswith(name) for own in known)
            if not fits and not is_exclusion:
                what = f"names interface {name!r}, which this machine does not have"
                hint = f"one of {', '.join(sorted(known))}; or unset it"
                yield Finding("variables", "fail", what, f"{variable}={text}", hint)


def _check_worker_variables(here: ProbeEnvironment) -> Iterator[Finding]:
    """Yield variables of a worker that are set in a shell, and an address of no use to others."""
    environ = here.environ
    left = [name for name in WORKER_VARIABLES if name in environ]
    is_worker = any(name.startswith(("SLURM_", "OMPI_", "PMI", "PBS_", "LSB_")) for name in environ)
    if "RANK" in left and "WORLD_SIZE" in left and not is_worker:
        what = "variables of a worker are set in this shell"
        hint = f"unset {' '.join(left)}: scripts would wait for ranks that do not exist"
        yield Finding("variables", "warn", what, ", ".join(left), hint)
    master = environ.get("MASTER_ADDR", "")
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not (master and world.isdecimal() and local.isdecimal() and int(world) > int(local)):
        return
    if master == "localhost" or is_loopback(master):
        what = f"is this host for every node, but there are {world} ranks, {local} of them here"
        hint = "use an address of the first node that the others reach"
        yield Finding("variables", "fail", what, f"MASTER_ADDR={master}", hint)


def _check_pairs(here: ProbeEnvironment) -> Iterator[Finding]:
    environ = here.environ
    for name, effect in SLOW_VARIABLES.items():
        if environ.get(name, "0") not in ("0", ""):
            hint = f"unset {name} unless you are debugging"
            yield Finding("variables", "warn", f"is set: {effect}", f"{name}={environ[name]}", hint)
    for old, new in RENAMED_VARIABLES.items():
        if old in environ and environ.get(new, environ[old]) != environ[old]:
            what = f"contradicts {new}={environ[new]}"
            yield Finding("variables", "fail", what, f"{old}={environ[old]}", f"unset {old}")
    past, now = environ.get("PYTORCH_CUDA_ALLOC_CONF"), environ.get("PYTORCH_ALLOC_CONF")
    if past and now and past != now:
        what = "contradicts PYTORCH_ALLOC_CONF, and torch reads one of them"
        hint = "unset PYTORCH_CUDA_ALLOC_CONF, the old name"
        yield Finding("variables", "warn", what, "PYTORCH_CUDA_ALLOC_CONF", hint)
    adapters = here.root / "sys/class/infiniband"
    if environ.get("NCCL_IB_DISABLE", "0") == "1" and adapters.is_dir() and any(adapters.iterdir()):
        what = "is set, but this machine has RDMA adapters: NCCL uses TCP"
        yield Finding("variables", "warn", what, "NCCL_IB_DISABLE=1", "unset NCCL_IB_DISABLE")
    if environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void") and environ.get(
        "CUDA_VISIBLE_DEVICES"
    ):
        what = "lists devices, but NVIDIA_VISIBLE_DEVICES gives the container none"
        hint = "start the container with its devices: docker --gpus all"
        yield Finding("variables", "fail", what, "CUDA_VISIBLE_DEVICES", hint)


def _check_threads(here: ProbeEnvironment) -> Iterator[Finding]:
    count = read_cpus(here.root).usable_cpus
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = here.environ.get(name, "")
        first = text.partition(",")[0].strip()
        if text and (not first.isdecimal() or not int(first)):
            hint = f"unset {name}: pdrun sets the CPUs of each worker"
            yield Finding("variables", "fail", "must be a positive number", f"{name}={text}", hint)
        elif first and int(first) > count:
            what = f"is more than the {count} CPUs that this process may use"
            hint = f"unset {name}: pdrun sets the CPUs of each worker"
            yield Finding("variables", "warn", what, f"{name}={text}", hint)


def _check_libraries(here: ProbeEnvironment) -> Iterator[Finding]:
    """Yield folders of LD_LIBRARY_PATH whose libraries replace torch's own."""
    for folder in here.environ.get("LD_LIBRARY_PATH", "").split(":"):
        for name in RUNTIME_LIBRARIES if folder else ():
            if Path(folder, name).exists():
                what = f"has {name}, which replaces the one that torch was built with"
                hint = "remove the folder from LD_LIBRARY_PATH, unless that is intended"
                yield Finding("variables", "warn", what, f"LD_LIBRARY_PATH: {folder}", hint)
    for name in ("LD_PRELOAD",):
        for path in here.environ.get(name, "").replace(":", " ").split():
            if "/" in path and not Path(path).exists():
                what = f"names {path}, which does not exist"
                yield Finding("variables", "warn", what, name, f"unset {name}")
