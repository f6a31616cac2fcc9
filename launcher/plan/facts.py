"""
The one impure step before planning: what is true on this machine, as one frozen `Facts`.

Only what the plan needs is looked at: a job of one node asks neither the network nor psutil,
``--backend cpu`` probes no accelerator, and neither torch nor the user's script is ever imported. A
probe that fails leaves its reason in the facts; only what no plan could do without raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pdrun
from pdrun.backends import affinity
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common import files, network
from pdrun.launcher.config.spec import JobSpec
from pdrun.launcher.plan import hosts as fan
from pdrun.launcher.plan import program
from pdrun.launcher.plan.model import BackendFacts, ExternalLauncher, Facts
from pdrun.topology import Device

if TYPE_CHECKING:
    from pdrun.launcher.supervisor.warm_client import WarmScan


def gather_facts(
    spec: JobSpec,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    *,
    starter: str = "",
) -> Facts:
    """
    Look at this machine for the sake of ``spec``.

    Args:
        environ: stands in for the process's environment.
        root: where /sys, /proc and /dev are; tests pass a tree of their own.
        starter: ``mpirun`` or ``srun``, where that is to start the agents (`through.starter_for`).

    Raises:
        ConfigError: the working directory is gone. UsageError: the folder of ``--chdir`` is not
            there.
    """
    environ = dict(os.environ if environ is None else environ)
    warm = _scan_warm_processes(spec, environ)
    cwd = _resolve_cwd(spec)
    hostname = os.uname().nodename
    networked = is_networked(spec)
    addresses = network.list_addresses() if networked else (network.LOOPBACK_INTERFACE,)
    scheduler = spec.place.scheduler
    found = program.check_program(spec.program, cwd, {**environ, **spec.env})
    torch = _torch_search_path(spec)
    here: tuple[str, ...] = ()
    if spec.place.hosts:
        names = ((host.name, host.address) for host in spec.place.hosts)
        here = network.find_own_names(names, hostname)
    route = _find_route(spec, here) if networked else network.LOOPBACK_INTERFACE[1]
    return Facts(
        hostname=hostname,
        environ=environ,
        cwd=cwd,
        python=sys.executable,
        python_version=".".join(map(str, sys.version_info[:3])),
        torch_version=read_torch_version(torch),
        pdrun_version=pdrun.__version__,
        cpus=affinity.read_cpus(root),
        backends=probe_backends(spec.resources.backend, environ, root, torch),
        addresses=addresses,
        uid=os.getuid(),
        external_launcher=_find_external_launcher(starter, spec, environ),
        local_hosts=here,
        script_digest=_hash_file(found.file) if networked and found.file else "",
        is_scheduler_local=network.is_this_machine(scheduler.host, hostname, addresses)
        if networked and scheduler
        else None,
        route_address=route,
        is_loopback_name=bool(
            networked
            and scheduler
            and network.is_loopback_name(scheduler.host)
            and route
            and not network.is_loopback(route)
        ),
        scheduler_error="" if route else _scheduler_name_error(spec, here),
        program_error=found.error,
        program_error_code=found.exit_code,
        log_error=check_log_dir(spec, cwd),
        mentions_torch=found.mentions_torch,
        imports_torch=found.script.imports_torch,
        uses_optimizer=found.script.uses_optimizer,
        exec_reason=found.exec_reason,
        late_variable=found.script.late_variable,
        warm=warm.collect_answers() if warm is not None else (),
    )


def _scan_warm_processes(spec: JobSpec, environ: Mapping[str, str]) -> WarmScan | None:
    """
    Ask the warm processes of this user, where a job could use one and there is a folder of theirs
    at all.
    """
    if not spec.program.warm or spec.program.kind == "command" or spec.program.start == "exec":
        return None
    if not files.has_warm_socket(environ):
        return None
    from pdrun.launcher.supervisor.warm_client import WarmScan

    return WarmScan(environ)


def _find_external_launcher(
    how: str, spec: JobSpec, environ: Mapping[str, str]
) -> ExternalLauncher | None:
    if not how:
        return None
    from pdrun.launcher.plan import find_launchers as starters

    return starters.find_external_launcher(how, spec, environ)


def _find_route(spec: JobSpec, here: tuple[str, ...]) -> str:
    """
    Return our address on the way to the scheduler, or to a listed host that is another machine, or
    to the world.
    """
    if spec.place.scheduler:
        return network.find_local_address(spec.place.scheduler)
    others = [Endpoint(host.peer_address, 0) for host in spec.place.hosts if host.name not in here]
    return next(
        filter(None, map(network.find_local_address, others[:8])), ""
    ) or network.find_local_address(None)


def _scheduler_name_error(spec: JobSpec, here: tuple[str, ...]) -> str:
    """Return why the name of the scheduler's host, or of a listed one, leads nowhere."""
    others = [host.peer_address for host in spec.place.hosts if host.name not in here][:8]
    names = [spec.place.scheduler.host] if spec.place.scheduler else others
    return next(filter(None, map(network.find_name_error, names)), "")


def is_networked(spec: JobSpec) -> bool:
    """Return whether the job may meet other machines."""
    place = spec.place
    return (
        not place.local
        and place.simulated is None
        and (spec.resources.max_members > 1 or place.serve is not None)
    )


def _resolve_cwd(spec: JobSpec) -> str:
    try:
        start = Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is gone ({error.strerror})", hint="cd to one that is there"
        ) from None
    cwd = os.path.normpath(start / spec.chdir)
    if fan.uses_ssh(
        spec
    ):  # the folder is the hosts' affair, and they may know it by the name that the shell gives it
        typed = os.environ.get("PWD", "")
        alike = typed.startswith("/") and files.path_exists(typed) and Path(typed).samefile(start)
        return os.path.normpath(Path(typed if alike else start, spec.chdir))
    if not files.is_folder(cwd):
        why = files.why_inaccessible(cwd)
        what = f"cannot be reached: {why}" if why else "is not a directory"
        raise UsageError(f"{spec.chdir!r} {what}", where="--chdir")
    return cwd


def probe_backends(
    wanted: str, environ: Mapping[str, str], root: Path = Path("/"), torch: list[str] | None = None
) -> tuple[BackendFacts, ...]:
    """
    Return what each device kind found, in the order of `auto`; only the CPU when nothing else is
    wanted.
    """
    if wanted == "cpu":
        return (BackendFacts("cpu", True, "always there", (Device("cpu", 0),)),)
    from pdrun.backends import detect

    probes = detect.probe_all(environ, root, build=lambda: detect.installed_torch(torch))
    return tuple(
        BackendFacts(probe.name, probe.present, probe.reason, probe.devices, probe.broken)
        for probe in probes
    )


def _torch_search_path(spec: JobSpec) -> list[str] | None:
    """
    Return the module path of another interpreter, by where it lies (PREFIX/bin/python); None: our
    own.
    """
    python = spec.program.python
    if not python:
        return None
    prefix = Path(python).parent.parent
    if "/" in python:
        return [str(path) for path in prefix.glob("lib/python3*/site-packages")]
    return []


def read_torch_version(path: list[str] | None = None) -> str:
    """
    Return the version of torch on ``path`` (None: this interpreter's), read from its version file;
    or empty.
    """
    for folder in sys.path if path is None else path:
        try:
            text = (Path(folder) / "torch" / "version.py").read_text(
                encoding="utf-8", errors="replace"
            )
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("__version__") and "=" in line:
                return line.partition("=")[2].strip().strip("'\"")
    return ""


def _hash_file(path: str) -> str:
    import hashlib

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def check_log_dir(spec: JobSpec, cwd: str) -> str:
    """
    Return why log files could not be made in the folder that was asked for, or the empty string.
    """
    if not spec.output.files:
        return ""
    typed = Path(cwd, spec.output.log_dir)
    path = Path(os.path.realpath(typed))
    if str(path).startswith(("/proc/", "/sys/")):
        return "lies in a file system of the kernel"
    if files.is_link(typed) and not files.path_exists(path):
        return "is a link to nothing"
    while not files.path_exists(path) and path != path.parent:
        path = path.parent
    if not files.is_folder(path):
        return f"cannot be made: {path} is not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"cannot be written: {path} belongs to another user or is read-only"
    return ""


def with_network(facts: Facts, addresses: tuple[tuple[str, str], ...], route: str) -> Facts:
    """
    Return the facts with the machine's real addresses, for a report on a job that would not need
    them.
    """
    return replace(facts, addresses=addresses, route_address=route)
