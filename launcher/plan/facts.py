"""
Gather the facts of this machine before planning, as one frozen `Facts`. Not pure.

Only facts that the plan needs are gathered. A job of one node uses neither the network nor psutil,
and ``--backend cpu`` probes no accelerator. torch and the user's script are never imported. A
failed probe stores its reason in the facts. Only an error that makes every plan impossible is
raised.
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
from pdrun.disk import foreign_owner
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common import files, network
from pdrun.launcher.config.spec import JobSpec
from pdrun.launcher.plan import hosts, program
from pdrun.launcher.plan.model import BackendFacts, ExternalLauncher, Facts
from pdrun.quick_dataclass import dataclass
from pdrun.topology import Device

if TYPE_CHECKING:
    from pdrun.launcher.supervisor.warm_client import WarmScan


@dataclass(frozen=True)
class NetworkFacts:
    """How this machine reaches the others; the defaults are those of a job of one machine."""

    addresses: tuple[tuple[str, str], ...] = (network.LOOPBACK_INTERFACE,)
    route: str = network.LOOPBACK_INTERFACE[1]
    is_scheduler_local: bool | None = None
    is_loopback_name: bool = False
    scheduler_error: str = ""


def gather_facts(
    spec: JobSpec,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    *,
    external_launcher: str = "",
) -> Facts:
    """
    Gather the facts that the plan of ``spec`` needs.

    Args:
        environ: replaces the process's environment.
        root: folder of /sys, /proc and /dev; tests pass their own tree.
        external_launcher: ``mpirun`` or ``srun`` if it starts the agents
            (`pdrun.launcher.plan.external.external_launcher_for`).

    Raises:
        ConfigError: the working directory was deleted.
        UsageError: the folder of ``--chdir`` does not exist.
    """
    if environ is None:
        environ = os.environ
    environ = dict(environ)
    # the warm processes answer while the other facts are gathered
    warm_scan = _scan_warm_processes(spec, environ)
    cwd = _resolve_cwd(spec)
    hostname = os.uname().nodename
    check = program.check_program(spec.program, cwd, {**environ, **spec.env})
    torch_path = _torch_search_path(spec)
    is_store_local, is_store_loopback = _locate_store(spec, hostname)
    local_hosts = _find_local_hosts(spec, hostname)
    same_machine = _find_same_machine(spec, local_hosts)
    net = NetworkFacts()
    script_digest = ""
    if is_networked(spec):
        net = _gather_network(spec, hostname, local_hosts)
        if check.file:
            script_digest = _hash_file(check.file)
    return Facts(
        hostname=hostname,
        environ=environ,
        cwd=cwd,
        python=sys.executable,
        python_version=".".join(map(str, sys.version_info[:3])),
        torch_version=read_torch_version(torch_path),
        pdrun_version=pdrun.__version__,
        cpus=affinity.read_cpus(root),
        backends=probe_backends(spec.resources.backend, environ, root, torch_path),
        addresses=net.addresses,
        uid=os.getuid(),
        physical_interfaces=network.find_physical(net.addresses, root),
        external_launcher=_find_external_launcher(external_launcher, spec, environ),
        local_hosts=local_hosts,
        script_digest=script_digest,
        is_scheduler_local=net.is_scheduler_local,
        same_machine=same_machine,
        is_store_local=is_store_local,
        is_store_loopback=is_store_loopback,
        route_address=net.route,
        is_loopback_name=net.is_loopback_name,
        scheduler_error=net.scheduler_error,
        program_error=check.error,
        program_error_code=check.exit_code,
        log_error=check_log_dir(spec, cwd),
        mentions_torch=check.mentions_torch,
        imports_torch=check.script.imports_torch,
        uses_optimizer=check.script.uses_optimizer,
        exec_reason=check.exec_reason,
        late_variable=check.script.late_variable,
        script_store_port=check.script.store_port,
        script_store_source=check.script.store_source,
        warm=warm_scan.collect_answers() if warm_scan else (),
    )


def _scan_warm_processes(spec: JobSpec, environ: Mapping[str, str]) -> WarmScan | None:
    """
    Start a scan for warm processes if the job could use one and their folder exists.
    """
    if not spec.program.warm or spec.program.kind == "command" or spec.program.start == "exec":
        return None
    if not files.has_warm_socket(environ):
        return None
    from pdrun.launcher.supervisor.warm_client import WarmScan

    return WarmScan(environ)


def _find_external_launcher(
    kind: str, spec: JobSpec, environ: Mapping[str, str]
) -> ExternalLauncher | None:
    if not kind:
        return None
    from pdrun.launcher.plan import find_launchers

    return find_launchers.find_external_launcher(kind, spec, environ)


def _locate_store(spec: JobSpec, hostname: str) -> tuple[bool | None, bool]:
    """Return whether the host of torch's store is this machine, and whether it is loopback."""
    host = spec.place.store.host if spec.place.store else ""
    if not host or host in ("0.0.0.0", "::"):
        return None, False
    if host == "localhost" or network.is_loopback(host) or network.is_loopback_name(host):
        return network.is_this_machine(host, hostname, ()), True
    own = network.list_addresses()
    if host == hostname or network.resolve_host(host):
        return network.is_this_machine(host, hostname, own), False
    return None, False


def _find_local_hosts(spec: JobSpec, hostname: str) -> tuple[str, ...]:
    """Return the names in the host list that are this machine."""
    if not spec.place.hosts:
        return ()
    names = ((host.name, host.address) for host in spec.place.hosts)
    return network.find_own_names(names, hostname)


def _gather_network(spec: JobSpec, hostname: str, local_hosts: tuple[str, ...]) -> NetworkFacts:
    """Return this machine's addresses, its route to the others, and where the scheduler is."""
    addresses = network.list_addresses()
    route = _find_route(spec, local_hosts)
    scheduler_error = ""
    if not route:
        scheduler_error = _scheduler_name_error(spec, local_hosts)
    is_scheduler_local = None
    is_loopback_name = False
    scheduler = spec.place.scheduler
    if scheduler:
        is_scheduler_local = network.is_this_machine(scheduler.host, hostname, addresses)
        has_route = bool(route) and not network.is_loopback(route)
        is_loopback_name = network.is_loopback_name(scheduler.host) and has_route
    return NetworkFacts(addresses, route, is_scheduler_local, is_loopback_name, scheduler_error)


def _find_route(spec: JobSpec, local_hosts: tuple[str, ...]) -> str:
    """
    Return the local address of the route to the scheduler, to another listed host, or to the
    default gateway.
    """
    if spec.place.scheduler:
        return network.find_local_address(spec.place.scheduler)
    others = [
        Endpoint(host.peer_address, 0) for host in spec.place.hosts if host.name not in local_hosts
    ]
    for other in others[:8]:
        if address := network.find_local_address(other):
            return address
    return network.find_local_address(None)


def _find_same_machine(spec: JobSpec, local_hosts: tuple[str, ...]) -> str:
    """
    Return which two of the listed hosts are one machine; empty: none are known to be.

    Hosts with a port of ssh or with ``addr=`` are not compared: containers may share an address.
    """
    if spec.place.simulated is not None or len(spec.place.hosts) < 2:
        return ""
    names = [host.name for host in spec.place.hosts if host.port is None and not host.address]
    own = [name for name in names if name in local_hosts]
    if len(own) > 1:
        return f"{own[0]} and {own[1]} are both this machine"
    if pair := network.find_same_machine(names):
        return f"{pair[0]} and {pair[1]} are one machine ({pair[2]})"
    return ""


def _scheduler_name_error(spec: JobSpec, local_hosts: tuple[str, ...]) -> str:
    """Return why the name of the scheduler's host, or of a listed host, cannot be resolved."""
    if spec.place.scheduler:
        return network.find_name_error(spec.place.scheduler.host)
    others = [host for host in spec.place.hosts if host.name not in local_hosts]
    for host in others[:8]:
        if error := network.find_name_error(host.peer_address):
            return error
    return ""


def is_networked(spec: JobSpec) -> bool:
    """Return whether the job may use several machines."""
    place = spec.place
    if place.local or place.simulated is not None:
        return False
    return spec.resources.max_members > 1 or place.serve is not None


def _resolve_cwd(spec: JobSpec) -> str:
    try:
        start = Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory does not exist ({error.strerror})",
            hint="change to an existing directory",
        ) from None
    cwd = os.path.normpath(start / spec.chdir)
    if hosts.uses_ssh(spec):
        # the folder must exist on the hosts, which may know it by the shell's name with links
        shell_name = os.environ.get("PWD", "")
        is_path = shell_name.startswith("/") and files.path_exists(shell_name)
        if is_path and Path(shell_name).samefile(start):
            start = Path(shell_name)
        return os.path.normpath(Path(start, spec.chdir))
    if not files.is_folder(cwd):
        what = "is not a directory"
        if reason := files.why_inaccessible(cwd):
            what = f"cannot be accessed: {reason}"
        raise UsageError(f"{spec.chdir!r} {what}", where="--chdir")
    return cwd


def probe_backends(
    wanted: str, environ: Mapping[str, str], root: Path = Path("/"), torch: list[str] | None = None
) -> tuple[BackendFacts, ...]:
    """
    Return the facts of each backend in the order of `auto`; of ``cpu`` only if it is selected.
    """
    if wanted == "cpu":
        return (BackendFacts("cpu", True, "always available", (Device("cpu", 0),)),)
    from pdrun.backends import detect

    probes = detect.probe_all(environ, root, build=lambda: detect.installed_torch(torch))
    return tuple(
        BackendFacts(probe.name, probe.present, probe.reason, probe.devices, probe.broken)
        for probe in probes
    )


def _torch_search_path(spec: JobSpec) -> list[str] | None:
    """
    Return the module path of another interpreter (PREFIX/bin/python); None: that of this process.
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
    Return the version of torch on ``path`` (None: this interpreter's) from its version file; empty
    if torch is not installed.
    """
    if path is None:
        path = sys.path
    for folder in path:
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
    Return why the log folder cannot be used, or the empty string.
    """
    if not spec.output.files:
        return ""
    given_path = Path(cwd, spec.output.log_dir)
    path = Path(os.path.realpath(given_path))
    if str(path).startswith(("/proc/", "/sys/")):
        return "is in a file system of the kernel"
    if files.is_link(given_path) and (owner := foreign_owner(given_path.lstat())):
        return f"is a link that {owner}, who could lead the logs to any folder"
    if files.is_link(given_path) and not files.path_exists(path):
        return "is a broken link"
    while not files.path_exists(path) and path != path.parent:
        path = path.parent
    if not files.is_folder(path):
        return f"cannot be created: {path} is not a directory"
    if path == Path(os.path.realpath(given_path)) and (owner := foreign_owner(path.stat())):
        return f"{owner}, who could read and replace the logs"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"cannot be written: {path} belongs to another user or is read-only"
    return ""


def with_network(facts: Facts, addresses: tuple[tuple[str, str], ...], route: str) -> Facts:
    """
    Return the facts with the machine's addresses, for a report on a job that does not need them.
    """
    return replace(facts, addresses=addresses, route_address=route)
