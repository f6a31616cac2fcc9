"""
Batch systems that reserve hosts and start nothing: PBS, LSF, SGE, OAR, Cobalt, LoadLeveler, and the
launcher pod of the MPI operator.

    PBS   PBS_JOBID=123.server PBS_NODEFILE=/var/spool/pbs/aux/123.server
          one line per slot; the lines of a host need not be adjacent
    LSF   LSB_JOBID=71 with one of
          LSB_MCPU_HOSTS="hA 2 hB 4", LSB_HOSTS="hA hA hB", LSB_DJOB_HOSTFILE (as PBS)
    OAR   OAR_JOB_ID=9 OAR_NODEFILE=/var/lib/oar/9 (as PBS)
    Cobalt  COBALT_JOBID=9 COBALT_NODEFILE=/var/tmp/cobalt.9 (as PBS)
    LoadLeveler  LOADL_STEP_ID=h1.9.0 LOADL_HOSTFILE=/tmp/ll.9 (as PBS); for small jobs also
          LOADL_PROCESSOR_LIST="hA hA hB"
    SGE   JOB_ID=9 NSLOTS=8 PE_HOSTFILE with lines "node1 4 all.q@node1 UNDEFINED"
          SGE_TASK_ID is the index of an array job, not a rank

pbsdsh and blaunch start one command per host. Their tasks have no rank, so the node rank is the
position of the host in the list.
"""

from __future__ import annotations

import re

from pdrun.errors import ConfigError, PdrunError
from pdrun.launcher.adapters.model import (
    HOST_NAME,
    AllocatedHost,
    LauncherInfo,
    LauncherKind,
    Probes,
)
from pdrun.launcher.adapters.parsing import (
    MAX_VALUE_CHARS,
    Environ,
    LauncherAdapter,
    find_own_host,
    parse_host_names,
    read_lines,
    read_number,
)
from pdrun.launcher.hosts import hostfile
from pdrun.topology import is_in_kubernetes

_HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)
_OPERATOR_HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI operator mounts the hostfile."""


def _read_pbs(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts = parse_host_names(
        read_lines(environ["PBS_NODEFILE"], "PBS_NODEFILE", probes), "PBS_NODEFILE"
    )
    task = read_number(environ, "PBS_TASKNUM") or 0
    kind: LauncherKind = "task" if task > 1 else "allocation"
    limit = read_number(environ, "PBS_WALLTIME")
    title = "an allocation of PBS"
    node_rank = None
    if kind == "task":
        title = "pbsdsh (a task of PBS)"
        node_rank = find_own_host(hosts, probes)
    return LauncherInfo(
        "pbs",
        title,
        kind,
        node_rank=node_rank,
        nodes=len(hosts),
        hosts=hosts,
        job_id=environ.get("PBS_JOBID", ""),
        time_limit=float(limit) if limit else None,
        sources={
            "nodes": "PBS_NODEFILE",
            "hosts": "PBS_NODEFILE",
            "job_id": "PBS_JOBID",
            "time_limit": "PBS_WALLTIME",
            "node_rank": "PBS_NODEFILE",
        },
    )


def _read_lsf_hosts(environ: Environ, probes: Probes) -> tuple[tuple[AllocatedHost, ...], str]:
    """
    Return the hosts and the variable that they come from.

    The file has precedence, because LSF truncates the lists of large jobs.
    """
    if "LSB_DJOB_HOSTFILE" in environ:
        name = "LSB_DJOB_HOSTFILE"
        return parse_host_names(read_lines(environ[name], name, probes), name), name
    name = "LSB_MCPU_HOSTS" if "LSB_MCPU_HOSTS" in environ else "LSB_HOSTS"
    words = environ[name][: MAX_VALUE_CHARS + 1].split()
    if not words:
        raise ConfigError("has no host", where=name)
    if len(environ[name]) > MAX_VALUE_CHARS:
        raise ConfigError(f"must have at most {MAX_VALUE_CHARS} characters", where=name)
    if name == "LSB_HOSTS":
        return parse_host_names(words, name), name
    counts_ok = all(re.fullmatch("[0-9]{1,6}", count) for count in words[1::2])
    if len(words) % 2 or not counts_ok:
        raise ConfigError("must be a list of HOST NUMBER pairs", where=name)
    hosts = parse_host_names(words[::2], name)
    if len(hosts) * 2 != len(words):
        raise ConfigError("lists a host twice", where=name)
    pairs = zip(words[::2], words[1::2], strict=True)
    return tuple(AllocatedHost(host, int(count)) for host, count in pairs), name


def _drop_launch_node(hosts: tuple[AllocatedHost, ...]) -> tuple[AllocatedHost, ...]:
    """
    Return the hosts without the one that only runs the batch script.

    On IBM's clusters LSF lists it first, with one slot (``batch2 1 h36n12 42``).
    """
    if len(hosts) < 2 or not re.match(r"(batch|login|launch)", hosts[0].name):
        return hosts
    is_apart = hosts[0].slots == 1 and not re.match(r"(batch|login|launch)", hosts[1].name)
    return hosts[1:] if is_apart else hosts


def _read_lsf(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts, name = _read_lsf_hosts(environ, probes)
    left = _drop_launch_node(hosts)
    if len(left) == 1 and left != hosts and probes.is_here(hosts[0].name):
        raise ConfigError(
            f"has one host, {left[0].name}, but this machine is {hosts[0].name},"
            " which only runs the batch script",
            where=name,
            hint=f"start pdrun by jsrun, or use --hosts {left[0].name}",
        )
    hosts = left
    kind: LauncherKind = "allocation"
    title = "an allocation of LSF"
    node_rank = None
    if "LSF_PM_TASKID" in environ:
        kind = "task"
        title = "blaunch (a task of LSF)"
        node_rank = find_own_host(hosts, probes)
    job = environ.get("LSB_JOBID", "")
    index = environ.get("LSB_JOBINDEX", "0")
    if index != "0":
        job += f".{index}"
    return LauncherInfo(
        "lsf",
        title,
        kind,
        node_rank=node_rank,
        nodes=len(hosts),
        hosts=hosts,
        job_id=job,
        sources={
            "nodes": name,
            "hosts": name,
            "job_id": "LSB_JOBID, LSB_JOBINDEX",
            "node_rank": name,
        },
    )


def _read_host_file(variable: str, environ: Environ, probes: Probes) -> tuple[AllocatedHost, ...]:
    """Return the hosts of a file in one of the grammars of `pdrun.launcher.hosts.hostfile`."""
    text = "\n".join(read_lines(environ[variable], variable, probes))
    try:
        hosts = hostfile.parse_hostfile(text, environ[variable])
    except PdrunError as error:
        raise ConfigError(str(error), where=variable) from None
    return tuple(AllocatedHost(host.name, host.devices) for host in hosts)


def _read_sge(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts = _read_host_file("PE_HOSTFILE", environ, probes)
    job = environ.get("JOB_ID", "")
    array_index = environ.get("SGE_TASK_ID", "undefined")
    if array_index != "undefined":
        job += f".{array_index}"
    return LauncherInfo(
        "sge",
        "an allocation of Grid Engine",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=job,
        attempt=read_number(environ, "RESTARTED") or 0,
        sources={
            "nodes": "PE_HOSTFILE",
            "hosts": "PE_HOSTFILE",
            "job_id": "JOB_ID",
            "attempt": "RESTARTED",
        },
    )


def _read_loadleveler(environ: Environ, probes: Probes) -> LauncherInfo:
    """Read the file, which has precedence: LoadLeveler leaves the list out for large jobs."""
    name = _find_loadleveler_variable(environ)
    if name == "LOADL_HOSTFILE":
        names = read_lines(environ[name], name, probes)
    else:
        names = environ[name][:MAX_VALUE_CHARS].split()
    hosts = parse_host_names(names, name)
    if not hosts:
        raise ConfigError("has no host", where=name)
    return LauncherInfo(
        "loadleveler",
        "an allocation of LoadLeveler",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=environ.get("LOADL_STEP_ID", ""),
        sources={"nodes": name, "hosts": name, "job_id": "LOADL_STEP_ID"},
    )


def _find_loadleveler_variable(environ: Environ) -> str:
    names = ("LOADL_HOSTFILE", "LOADL_PROCESSOR_LIST")
    return next((name for name in names if name in environ), "")


def _find_operator_variable(environ: Environ) -> str:
    return next((name for name in _HOSTFILE_VARIABLES if name in environ), "")


def _is_operator_launcher(environ: Environ) -> bool:
    """
    Return whether this is the launcher pod of an MPIJob. Before version 0.3 the operator sets no
    role. Then its hostfile shows it.
    """
    if environ.get("K_MPI_JOB_ROLE") == "launcher":
        return True
    path = environ.get(_find_operator_variable(environ), "")
    return is_in_kubernetes(environ) and path == _OPERATOR_HOSTFILE


def _read_mpi_operator(environ: Environ, probes: Probes) -> LauncherInfo:
    name = _find_operator_variable(environ)
    if not name:
        name = _OPERATOR_HOSTFILE
        environ = {name: _OPERATOR_HOSTFILE}
    hosts = _read_host_file(name, environ, probes)
    return LauncherInfo(
        "mpi-operator",
        "the launcher pod of an MPIJob",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=probes.hostname,
        sources={"nodes": name, "hosts": name, "job_id": HOST_NAME},
    )


def _node_file_adapter(family: str, title: str, file: str, job: str) -> LauncherAdapter:
    """
    Return the adapter of a batch system that gives a file with one line per slot, and no more.

    Args:
        family: name of the launcher.
        title: for messages.
        file: variable with the path.
        job: variable with the job id.
    """

    def read(environ: Environ, probes: Probes) -> LauncherInfo:
        hosts = parse_host_names(read_lines(environ[file], file, probes), file)
        return LauncherInfo(
            family,
            f"an allocation of {title}",
            "allocation",
            nodes=len(hosts),
            hosts=hosts,
            job_id=environ.get(job, ""),
            sources={"nodes": file, "hosts": file, "job_id": job},
        )

    prefixes = (f"{family.upper()}_",)
    return LauncherAdapter(family, title, lambda environ: file in environ, read, prefixes=prefixes)


ALLOCATION_ADAPTERS = (
    _node_file_adapter("oar", "OAR", "OAR_NODEFILE", "OAR_JOB_ID"),
    _node_file_adapter("cobalt", "Cobalt", "COBALT_NODEFILE", "COBALT_JOBID"),
    LauncherAdapter(
        "loadleveler",
        "LoadLeveler",
        lambda environ: bool(_find_loadleveler_variable(environ)),
        _read_loadleveler,
        prefixes=("LOADL_",),
    ),
    LauncherAdapter(
        "pbs", "PBS", lambda environ: "PBS_NODEFILE" in environ, _read_pbs, prefixes=("PBS_",)
    ),
    LauncherAdapter(
        "lsf",
        "LSF",
        lambda environ: (
            "LSB_JOBID" in environ
            and any(
                name in environ for name in ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")
            )
        ),
        _read_lsf,
        prefixes=("LSB_", "LSF_"),
    ),
    LauncherAdapter(
        "sge",
        "Grid Engine",
        lambda environ: "PE_HOSTFILE" in environ and "JOB_ID" in environ,
        _read_sge,
        prefixes=("PE_", "SGE_", "NSLOTS"),
    ),
    LauncherAdapter(
        "mpi-operator",
        "MPI operator",
        _is_operator_launcher,
        _read_mpi_operator,
        prefixes=("K_MPI_",),
    ),
)
