"""
What the launcher around this process means for the job: settings of the lowest rank, which everything
that the user says overrides.

A task that stands alone on its node becomes an agent: number of nodes, node rank, where the nodes
meet and the job's name follow. An allocation gives hosts. What would start a smaller job than was
meant, or several in the place of one, is refused with what to do instead. Pure: environment and
probes are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdrun.endpoint import port_for_job
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters import detect, mpi
from pdrun.launcher.adapters.model import LauncherInfo, Probes
from pdrun.launcher.adapters.names import START_LAUNCHERS
from pdrun.launcher.config.settings import Priority, Setting, Source
from pdrun.launcher.hosts.selection import Host, check_host_name

_MPI_NAMES = tuple(row.name for row in mpi.MPI_LAUNCHERS)
_WORKER_NAMES = tuple(row.name for row in mpi.WORKER_LAUNCHERS)
_ONE_TASK_COMMANDS = {
    "openmpi": "mpirun --map-by ppr:1:node",
    "mpich": "mpiexec -ppn 1",
    "intelmpi": "mpirun -ppn 1",
    "slurm-step": "srun --ntasks-per-node=1",
    "jsrun": "jsrun -r 1",
    "pals": "mpiexec --ppn 1",
    "flux": "flux run --tasks-per-node=1",
}
"""How to start one task a node."""
_OVERRIDING_PATHS = (
    "place.local",
    "torchrun.standalone",
    "hosts.all",
    "hosts.file",
    "place.rank_table",
)
"""What makes every other launcher's words needless."""


def detect_settings(
    settings: Iterable[Setting], environ: Mapping[str, str], probes: Probes
) -> tuple[tuple[Setting, ...], tuple[str, ...], tuple[str, ...]]:
    """
    Return the settings that the launcher around us amounts to, notes, and warnings.

    Raises:
        ConfigError: its words are malformed, contradict what the user said, or would start another
            job than was meant.
        UsageError: ``--launcher`` names one that says nothing here.
    """
    said: dict[str, Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.source.priority):
        said.setdefault(setting.path, setting)
    launcher = said["place.launcher"].value if "place.launcher" in said else ""
    if any(path in said and said[path].value for path in _OVERRIDING_PATHS):
        return (), (), ()
    found = detect.detect_launcher(environ, probes, launcher_to_detect(launcher))
    notes = tuple(f"{item.launcher} is ignored: {item.why}" for item in found.ignored)
    if found.kind == "none":
        return (), notes, found.notes
    made = (
        _allocation_settings(found, said)
        if found.kind == "allocation"
        else _task_settings(found, said, probes)
    )
    here = () if found.launcher == "pet" else (f"{found.title}: {_summarize_launcher(found)}",)
    return tuple(made), (*here, *notes), found.notes


def launcher_to_detect(launcher: str) -> str:
    """
    Return what ``--launcher`` has `detect` look for: nothing in particular where it names what
    starts the hosts.
    """
    return "" if launcher == "auto" or launcher in START_LAUNCHERS else launcher


def _summarize_launcher(found: LauncherInfo) -> str:
    parts = [
        f"node {found.node_rank}" if found.node_rank is not None else "",
        f"{found.nodes} node(s)" if found.nodes is not None else "",
        f"job {found.job_id}" if found.job_id else "",
    ]
    return ", ".join(filter(None, parts)) or "read"


def _make_setting(path: str, value: object, found: LauncherInfo, key: str) -> Setting:
    return Setting(
        path,
        value,
        Source(found.sources.get(key) or found.title, Priority.DETECTED, str(value)[:60]),
    )


def _allocation_settings(found: LauncherInfo, said: Mapping[str, Setting]) -> list[Setting]:
    """Hosts, unless the user says where this node stands: then the nodes are started one by one."""
    if found.launcher == "ascend":
        # every pod is started by the operator, or every host by hand: nobody is started by us
        return [
            _make_setting("place.rank_table", found.path, found, "hosts"),
            _make_setting("place.launcher", "none", found, "hosts"),
        ]
    if any(path in said for path in ("scheduler.host", "place.node_rank", "place.serve")):
        return []
    hosts = tuple(Host(host.name, where=found.sources.get("hosts", "")) for host in found.hosts)
    made = [_make_setting("hosts.all", hosts, found, "hosts")] if hosts else []
    return [*made, *_job_name_settings(found)] if len(hosts) > 1 else []


def _job_name_settings(found: LauncherInfo) -> list[Setting]:
    name = found.job_name
    return [_make_setting("job", name, found, "job_id")] if name else []


def _task_settings(found: LauncherInfo, said: Mapping[str, Setting], probes: Probes) -> list[Setting]:
    """The agent of one node of a job that the outer launcher has started everywhere."""
    if found.launcher in _WORKER_NAMES or found.launcher == "pet":
        return []  # inside a worker: a job of its own; PET_* are options, read as such
    if found.launcher == "variables":
        return _hand_set_settings(found, said)
    if (found.local_size or 1) > 1 or (found.local_rank or 0) > 0:
        raise _several_tasks_error(found)
    nodes = found.nodes
    if nodes is None:
        if "resources.nodes" not in said:
            raise ConfigError(
                f"{found.title} does not say how many nodes there are",
                where=found.sources.get("node_rank", ""),
                hint="say --nodes (PDRUN_NODES), or --launcher none for a job of this node alone",
            )
        nodes = int(said["resources.nodes"].value)
    elif "resources.nodes" in said and said["resources.nodes"].value != nodes:
        source = said["resources.nodes"].source
        raise source.make_error(
            f"{said['resources.nodes'].value} node(s), but {found.title} started {nodes}"
            f" ({found.sources.get('nodes')})",
            "leave it out, or say --launcher none for a job apart from it",
        )
    made = [_make_setting("resources.nodes", nodes, found, "nodes"), *_job_name_settings(found)]
    if nodes == 1:
        return made
    if found.node_rank is not None:
        made.append(_make_setting("place.node_rank", found.node_rank, found, "node_rank"))
    if found.launcher == "mindspore":
        made.append(
            _make_setting("place.serve", False, found, "head")
        )  # the scheduler is a pod of its own
    if "scheduler.host" not in said:
        made += _scheduler_settings(found, probes)
    return made


def _hand_set_settings(found: LauncherInfo, said: Mapping[str, Setting]) -> list[Setting]:
    """A rank of several without a launcher: does it count nodes or workers? Only the user knows."""
    if found.world == 1 or any(
        path in said for path in ("resources.nodes", "scheduler.host", "place.node_rank")
    ):
        return []
    raise ConfigError(
        f"{found.rank} of WORLD_SIZE={found.world}: set by hand, and pdrun gives ranks itself",
        where="RANK",
        hint="say --nodes, --node-rank and --scheduler; --launcher none starts a job of this node alone",
    )


def _several_tasks_error(found: LauncherInfo) -> ConfigError:
    count = f"{found.local_size} tasks" if found.local_size else "several tasks"
    one = (
        f"start one a node ({_ONE_TASK_COMMANDS[found.launcher]})"
        if found.launcher in _ONE_TASK_COMMANDS
        else "start one a node"
    )
    return ConfigError(
        f"{found.title} started {count} on this node, and each would start workers of its own",
        where=found.sources.get("local_size") or found.sources.get("local_rank", ""),
        hint=f"{one}, or the script itself with pdrun.init() in it; --launcher none makes each a job of its own",
    )


def _first_host(found: LauncherInfo) -> str:
    """
    The first host; LSF puts the host of the batch script in front of those on which jsrun starts
    tasks.
    """
    names = [host.name for host in found.hosts]
    if found.launcher == "jsrun" and len(names) > 1:
        apart = found.nodes is not None and len(names) == found.nodes + 1
        if apart or names[0].startswith(("batch", "login")):
            return names[1]
        return names[0]
    return names[0]


def _scheduler_settings(found: LauncherInfo, probes: Probes) -> list[Setting]:
    """The first host, else where mpirun itself runs; its port, else one from the job's name."""
    key = "hosts" if found.hosts else "head"
    host = _first_host(found) if found.hosts else found.head
    if not host:
        raise ConfigError(
            f"{found.title} does not say where node 0 is",
            where=found.sources.get("node_rank", ""),
            hint="say --scheduler HOST:PORT (PDRUN_SCHEDULER), the same for all nodes",
        )
    try:
        check_host_name(host, found.sources.get(key, ""))
    except UsageError as error:
        raise ConfigError(error.what, where=error.where, hint=error.hint) from None
    if found.launcher in _MPI_NAMES and found.node_rank == 0 and not probes.is_here(host):
        raise ConfigError(
            f"node 0 is {probes.hostname}, but the other nodes will look for it at {host}",
            where=found.sources.get(key, ""),
            hint="say --scheduler HOST:PORT (PDRUN_SCHEDULER), the same for all nodes",
        )
    name = found.job_name or f"{found.launcher}-{found.world}"
    port = found.port if found.port is not None else port_for_job(name)
    return [
        _make_setting("scheduler.host", host, found, key),
        _make_setting(
            "scheduler.port", port, found, "port" if found.port is not None else "job_id"
        ),
    ]
