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
from pdrun.launcher.adapters.model import Found, FoundHost, Kind, Probes
from pdrun.launcher.adapters.parsing import (
    LONGEST,
    Environ,
    Launcher,
    lines_of,
    named_hosts,
    number,
    place_of,
)
from pdrun.launcher.hosts import hostfile

_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")


def _pbs(environ: Environ, probes: Probes) -> Found:
    hosts = named_hosts(lines_of(environ["PBS_NODEFILE"], "PBS_NODEFILE", probes), "PBS_NODEFILE")
    task = number(environ, "PBS_TASKNUM") or 0
    kind: Kind = "task" if task > 1 else "allocation"
    limit = number(environ, "PBS_WALLTIME")
    return Found(
        "pbs",
        "pbsdsh (a task of PBS)" if kind == "task" else "an allocation of PBS",
        kind,
        node_rank=place_of(hosts, probes) if kind == "task" else None,
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


def _lsf_hosts(environ: Environ, probes: Probes) -> tuple[tuple[FoundHost, ...], str]:
    """
    The hosts, and the variable that gave them: the file counts before the lists, which LSF cuts for
    large jobs.
    """
    if "LSB_DJOB_HOSTFILE" in environ:
        name = "LSB_DJOB_HOSTFILE"
        return named_hosts(lines_of(environ[name], name, probes), name), name
    name = "LSB_MCPU_HOSTS" if "LSB_MCPU_HOSTS" in environ else "LSB_HOSTS"
    words = environ[name][: LONGEST + 1].split()
    if not words or len(environ[name]) > LONGEST:
        raise ConfigError("names no host" if not words else "is too long", where=name)
    if name == "LSB_HOSTS":
        return named_hosts(words, name), name
    if len(words) % 2 or not all(
        count.isascii() and count.isdigit() and len(count) < 7 for count in words[1::2]
    ):
        raise ConfigError("is not pairs of a host and a number", where=name)
    hosts = named_hosts(words[::2], name)
    if len(hosts) * 2 != len(words):
        raise ConfigError("names a host twice", where=name)
    return tuple(
        FoundHost(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)
    ), name


def _lsf(environ: Environ, probes: Probes) -> Found:
    hosts, name = _lsf_hosts(environ, probes)
    kind: Kind = "task" if "LSF_PM_TASKID" in environ else "allocation"
    index = environ.get("LSB_JOBINDEX", "0")
    job = environ.get("LSB_JOBID", "") + (f".{index}" if index != "0" else "")
    return Found(
        "lsf",
        "blaunch (a task of LSF)" if kind == "task" else "an allocation of LSF",
        kind,
        node_rank=place_of(hosts, probes) if kind == "task" else None,
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


def _file_hosts(variable: str, environ: Environ, probes: Probes) -> tuple[FoundHost, ...]:
    """The hosts of a file in one of the grammars of `pdrun.launcher.hosts.hostfile`."""
    text = "\n".join(lines_of(environ[variable], variable, probes))
    try:
        return tuple(
            FoundHost(host.name, host.devices) for host in hostfile.parse_hostfile(text, environ[variable])
        )
    except PdrunError as error:
        raise ConfigError(str(error), where=variable) from None


def _sge(environ: Environ, probes: Probes) -> Found:
    hosts = _file_hosts("PE_HOSTFILE", environ, probes)
    task = environ.get("SGE_TASK_ID", "undefined")
    return Found(
        "sge",
        "an allocation of Grid Engine",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=environ.get("JOB_ID", "") + (f".{task}" if task != "undefined" else ""),
        attempt=number(environ, "RESTARTED") or 0,
        sources={
            "nodes": "PE_HOSTFILE",
            "hosts": "PE_HOSTFILE",
            "job_id": "JOB_ID",
            "attempt": "RESTARTED",
        },
    )


def _operator_file(environ: Environ) -> str:
    return next((name for name in _OPERATOR if name in environ), "")


def _operator(environ: Environ, probes: Probes) -> Found:
    name = _operator_file(environ)
    hosts = _file_hosts(name, environ, probes)
    return Found(
        "mpi-operator",
        "the launcher pod of an MPIJob",
        "allocation",
        nodes=len(hosts),
        hosts=hosts,
        job_id=probes.hostname,
        sources={"nodes": name, "hosts": name, "job_id": "host name"},
    )


ALLOCATIONS = (
    Launcher("pbs", "PBS", lambda environ: "PBS_NODEFILE" in environ, _pbs, beginnings=("PBS_",)),
    Launcher(
        "lsf",
        "LSF",
        lambda environ: (
            "LSB_JOBID" in environ
            and any(
                name in environ for name in ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS")
            )
        ),
        _lsf,
        beginnings=("LSB_", "LSF_"),
    ),
    Launcher(
        "sge",
        "Grid Engine",
        lambda environ: "PE_HOSTFILE" in environ and "JOB_ID" in environ,
        _sge,
        beginnings=("PE_", "SGE_", "NSLOTS"),
    ),
    Launcher(
        "mpi-operator",
        "MPI operator",
        lambda environ: (
            environ.get("K_MPI_JOB_ROLE") == "launcher" and bool(_operator_file(environ))
        ),
        _operator,
        beginnings=("K_MPI_",),
    ),
)
