"""
Batch systems that give hosts and start nothing themselves: PBS, LSF, SGE, and the MPI operator's
launcher pod.

    PBS   PBS_JOBID=123.server PBS_NODEFILE=/var/spool/pbs/aux/123.server    one line a slot, repeats need not be
    neighbours LSF   LSB_JOBID=71 LSB_MCPU_HOSTS="hA 2 hB 4" or LSB_HOSTS="hA hA hB" or LSB_DJOB_HOSTFILE (as PBS)
    SGE   JOB_ID=9 PE_HOSTFILE with lines "node1 4 all.q@node1 UNDEFINED" NSLOTS=8; SGE_TASK_ID is an array's index, no
    rank

pbsdsh and blaunch start one command a host; their tasks know their host and no rank: the place in
the list counts.
"""

from __future__ import annotations

from pdrun.errors import ConfigError, PdrunError
from pdrun.launcher.adapters.model import LauncherInfo, AllocatedHost, LauncherKind, Probes
from pdrun.launcher.adapters.parsing import (
    MAX_VALUE_CHARS,
    Environ,
    LauncherAdapter,
    read_lines,
    parse_host_names,
    read_number,
    find_own_host,
)
from pdrun.launcher.hosts import hostfile

_HOSTFILE_VARIABLES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")


def _read_pbs(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts = parse_host_names(read_lines(environ["PBS_NODEFILE"], "PBS_NODEFILE", probes), "PBS_NODEFILE")
    task = read_number(environ, "PBS_TASKNUM") or 0
    kind: LauncherKind = "task" if task > 1 else "allocation"
    limit = read_number(environ, "PBS_WALLTIME")
    return LauncherInfo(
        "pbs",
        "pbsdsh (a task of PBS)" if kind == "task" else "an allocation of PBS",
        kind,
        node_rank=find_own_host(hosts, probes) if kind == "task" else None,
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
    The hosts, and the variable that gave them: the file counts before the lists, which LSF cuts for
    large jobs.
    """
    if "LSB_DJOB_HOSTFILE" in environ:
        name = "LSB_DJOB_HOSTFILE"
        return parse_host_names(read_lines(environ[name], name, probes), name), name
    name = "LSB_MCPU_HOSTS" if "LSB_MCPU_HOSTS" in environ else "LSB_HOSTS"
    words = environ[name][: MAX_VALUE_CHARS + 1].split()
    if not words or len(environ[name]) > MAX_VALUE_CHARS:
        raise ConfigError("names no host" if not words else "is too long", where=name)
    if name == "LSB_HOSTS":
        return parse_host_names(words, name), name
    if len(words) % 2 or not all(
        count.isascii() and count.isdigit() and len(count) < 7 for count in words[1::2]
    ):
        raise ConfigError("is not pairs of a host and a number", where=name)
    hosts = parse_host_names(words[::2], name)
    if len(hosts) * 2 != len(words):
        raise ConfigError("names a host twice", where=name)
    return tuple(
        AllocatedHost(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)
    ), name


def _read_lsf(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts, name = _read_lsf_hosts(environ, probes)
    kind: LauncherKind = "task" if "LSF_PM_TASKID" in environ else "allocation"
    index = environ.get("LSB_JOBINDEX", "0")
    job = environ.get("LSB_JOBID", "") + (f".{index}" if index != "0" else "")
    return LauncherInfo(
        "lsf",
        "blaunch (a task of LSF)" if kind == "task" else "an allocation of LSF",
        kind,
        node_rank=find_own_host(hosts, probes) if kind == "task" else None,
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
    """The hosts of a file in one of the grammars of `pdrun.launcher.hosts.hostfile`."""
    text = "\n".join(read_lines(environ[variable], variable, probes))
    try:
        return tuple(
            AllocatedHost(host.name, host.devices) for host in hostfile.parse_hostfile(text, environ[variable])
        )
    except PdrunError as error:
        raise ConfigError(str(error), where=variable) from None


def _read_sge(environ: Environ, probes: Probes) -> LauncherInfo:
    hosts = _read_host_file("PE_HOSTFILE", environ, probes)
    task = environ.get("SGE_TASK_ID", "undefined")
    return LauncherInfo(
        "sge",
        "an allocation of Grid Engine",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=environ.get("JOB_ID", "") + (f".{task}" if task != "undefined" else ""),
        attempt=read_number(environ, "RESTARTED") or 0,
        sources={
            "nodes": "PE_HOSTFILE",
            "hosts": "PE_HOSTFILE",
            "job_id": "JOB_ID",
            "attempt": "RESTARTED",
        },
    )


def _find_operator_variable(environ: Environ) -> str:
    return next((name for name in _HOSTFILE_VARIABLES if name in environ), "")


def _read_mpi_operator(environ: Environ, probes: Probes) -> LauncherInfo:
    name = _find_operator_variable(environ)
    hosts = _read_host_file(name, environ, probes)
    return LauncherInfo(
        "mpi-operator",
        "the launcher pod of an MPIJob",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=probes.hostname,
        sources={"nodes": name, "hosts": name, "job_id": "host name"},
    )


ALLOCATION_ADAPTERS = (
    LauncherAdapter("pbs", "PBS", lambda environ: "PBS_NODEFILE" in environ, _read_pbs, prefixes=("PBS_",)),
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
        lambda environ: (
            environ.get("K_MPI_JOB_ROLE") == "launcher" and bool(_find_operator_variable(environ))
        ),
        _read_mpi_operator,
        prefixes=("K_MPI_",),
    ),
)
