"""
Settings derived from the launcher that started this process. They have the lowest priority. Pure.

A task that is alone on its node becomes an agent. Number of nodes, node rank, scheduler address and
job name come from the launcher. An allocation provides hosts. If the result would be a smaller job
than requested, or several jobs, the message says what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pdrun.endpoint import port_for_job
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters import ascend, detect, mpi
from pdrun.launcher.adapters.model import HOST_NAME, LauncherInfo, Probes
from pdrun.launcher.adapters.names import START_LAUNCHERS
from pdrun.launcher.adapters.node_variables import NODE_COUNT_VARIABLES
from pdrun.launcher.common.network import is_loopback
from pdrun.launcher.common.parsers import parse_host, parse_servers, parse_tcp_port
from pdrun.launcher.config.settings import (
    Priority,
    Setting,
    SettingsByPath,
    Source,
    value_of,
)
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
"""Command that starts one task per node, by launcher."""
_WORKER_COUNT_VARIABLES = (
    "WORLD_SIZE",
    "RANK_SIZE",
    "MS_WORKER_NUM",
    "CM_WORKER_SIZE",
    "HOROVOD_SIZE",
)
"""Variables that count workers. They agree with ``--devices`` of one node."""
_OTHER_COUNT_VARIABLES = (
    *_WORKER_COUNT_VARIABLES,
    "PADDLE_NNODES",
    "PADDLE_TRAINERS_NUM",
    "LWS_GROUP_SIZE",
    "GLOBAL_REPLICAS",
    "VC_WORKER_NUM",
    "AZUREML_NODE_COUNT",
    "ARNOLD_WORKER_NUM",
    "NODE_NUM",
    "HOST_NUM",
    "NUM_MACHINES",
    "MA_NUM_HOSTS",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "PBS_NUM_NODES",
    "PBS_NNODES",
    "PJM_NODE",
    "LEPTON_JOB_TOTAL_WORKERS",
    "COBALT_PARTSIZE",
    "OCI__WORKER_COUNT",
    "_CONDOR_NPROCS",
    "GROUP_WORLD_SIZE",
)
"""Counts of other launchers, which mean several nodes if their other variables are not set."""
_SCHEDULER_PATHS = ("scheduler.host", "store.host")
"""Settings of the user that have the host of the scheduler."""
_PLACE_PATHS = (*_SCHEDULER_PATHS, "resources.nodes", "place.node_rank", "place.serve")
"""Settings of the user about the nodes of the job."""
_OVERRIDING_PATHS = (
    "place.local",
    "torchrun.standalone",
    "hosts.all",
    "hosts.file",
    "place.rank_table",
)
"""Settings that make the launcher's variables irrelevant."""


def detect_settings(
    settings: Iterable[Setting], environ: Mapping[str, str], probes: Probes
) -> tuple[tuple[Setting, ...], tuple[str, ...], tuple[str, ...]]:
    """
    Return the settings derived from the launcher, notes, and warnings.

    Raises:
        ConfigError: the launcher's variables are malformed, contradict the user's settings, or
            would start a different job.
        UsageError: ``--launcher`` names a launcher whose variables are not set.
    """
    given: SettingsByPath = {}
    for setting in sorted(settings, key=lambda setting: setting.source.priority):
        given.setdefault(setting.path, setting)
    store = _store_settings(environ)
    if any(value_of(given, path, None) for path in _OVERRIDING_PATHS):
        return (*_table_of_hosts(given, environ), *store), (), ()
    launcher = value_of(given, "place.launcher", "")
    found = detect.detect_launcher(environ, probes, launcher_to_detect(launcher))
    notes = tuple(f"{item.launcher} is ignored: {item.why}" for item in found.ignored)
    if found.kind == "none":
        if launcher != "none":
            _refuse_lost_count(environ, given)
        return store, notes, found.notes
    warnings = found.notes
    if found.kind == "allocation":
        derived = _allocation_settings(found, given)
    else:
        derived = _task_settings(found, given, probes)
    if found.launcher == "mindspore" and found.workers_per_node is None:
        derived = _with_table_nodes(derived, found, environ)
    if table := _table_settings(found, environ, launcher):
        derived = [*derived, *table]
        notes = tuple(
            note for note in notes if not note.startswith(f"{ascend.ASCEND_ADAPTER.name} ")
        )
    if found.sources.get("head") == HOST_NAME:  # node 0 reads a loopback address, others its name
        store = tuple(one for one in store if not _is_loopback_host(one))
    if found.launcher != "pet":
        notes = (f"{found.title}: {_summarize_launcher(found)}", *notes)
    return (*derived, *store), notes, warnings


def _refuse_lost_count(environ: Mapping[str, str], given: SettingsByPath) -> None:
    """
    Refuse a count above 1 of a launcher that pdrun cannot read: one node alone would be a smaller
    job. The user's own options of nodes count instead.
    """
    if any(path in given for path in _PLACE_PATHS):
        return
    if any(name in environ for name in ("PDRUN_GENERATION", "TORCHELASTIC_RUN_ID")):
        return
    devices = value_of(given, "resources.devices", None)
    for name in (*NODE_COUNT_VARIABLES, *_OTHER_COUNT_VARIABLES):
        text = environ.get(name, "")
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 2:
            continue
        if name in _WORKER_COUNT_VARIABLES and devices == int(text):
            continue
        raise ConfigError(
            f"is {text}, but no launcher's variables give this node its rank",
            where=name,
            hint="set --nodes, --node-rank and --scheduler, or --nodes 1"
            " for a job on this node only",
        )


def _with_table_nodes(
    derived: list[Setting], found: LauncherInfo, environ: Mapping[str, str]
) -> list[Setting]:
    """
    Without MS_LOCAL_WORKER, MindSpore's variables do not have the number of nodes. A rank table has
    it, and MS_WORKER_NUM must be the number of its ranks.
    """
    if "RANK_TABLE_FILE" not in environ:
        return derived
    left = [setting for setting in derived if setting.path != "resources.nodes"]
    return [*left, _make_setting("msrun.workers", found.world, found, "world")]


def _table_settings(
    found: LauncherInfo, environ: Mapping[str, str], launcher: str
) -> list[Setting]:
    """
    Return the rank table that is set beside the variables of another launcher.

    Raises:
        ConfigError: this process is already a rank of the table.
    """
    path = environ.get("RANK_TABLE_FILE", "")
    is_chosen = launcher_to_detect(launcher) not in ("", "ascend")
    if not path or is_chosen or found.launcher in ("ascend", *_WORKER_NAMES):
        return []
    ascend.check_no_rank(environ)
    return [Setting("place.rank_table", path, Source("RANK_TABLE_FILE", Priority.DETECTED, path))]


def _table_of_hosts(given: SettingsByPath, environ: Mapping[str, str]) -> list[Setting]:
    """
    Return the rank table of the environment where the user lists its hosts: both describe the job.

    Raises:
        ConfigError: this process is already a rank of the table.
    """
    lists_hosts = any(path in given for path in ("hosts.all", "hosts.file"))
    others = ("place.local", "torchrun.standalone", "place.rank_table")
    path = environ.get("RANK_TABLE_FILE", "")
    if not path or not lists_hosts or any(value_of(given, other, None) for other in others):
        return []
    if launcher_to_detect(value_of(given, "place.launcher", "")) not in ("", "ascend"):
        return []
    if any(name in environ for name in ("PDRUN_GENERATION", "TORCHELASTIC_RUN_ID")):
        return []
    ascend.check_no_rank(environ)
    return [Setting("place.rank_table", path, Source("RANK_TABLE_FILE", Priority.DETECTED, path))]


def _store_settings(environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """
    Return where torch's store shall listen by MASTER_ADDR and MASTER_PORT, which scripts may read
    or repeat. Those of an outer job are not the user's.
    """
    if any(name in environ for name in ("PDRUN_GENERATION", "TORCHELASTIC_RUN_ID")):
        return ()
    found = []
    for name, path, parser in (
        ("MASTER_ADDR", "store.host", parse_host),
        ("MASTER_PORT", "store.port", parse_tcp_port),
    ):
        if text := environ.get(name, ""):
            source = Source(name, Priority.DETECTED, text)
            try:
                found.append(Setting(path, parser(text, name), source))
            except UsageError as error:
                raise source.convert_error(error) from None
    return tuple(found)


def _is_loopback_host(setting: Setting) -> bool:
    host = setting.value
    return setting.path == "store.host" and (host == "localhost" or is_loopback(host))


def launcher_to_detect(launcher: str) -> str:
    """
    Return the argument of `detect_launcher` for a value of ``--launcher``: empty if the value names
    the program that starts the agents.
    """
    if launcher == "auto" or launcher in START_LAUNCHERS:
        return ""
    return launcher


def _summarize_launcher(found: LauncherInfo) -> str:
    parts = []
    if found.node_rank is not None:
        parts.append(f"node {found.node_rank}")
    if found.nodes is not None:
        parts.append(f"{found.nodes} node(s)")
    if found.job_id:
        parts.append(f"job {found.job_id}")
    return ", ".join(parts) or "read"


def _make_setting(path: str, value: object, found: LauncherInfo, key: str) -> Setting:
    return Setting(
        path,
        value,
        Source(found.sources.get(key) or found.title, Priority.DETECTED, str(value)[:60]),
    )


def _allocation_settings(found: LauncherInfo, given: SettingsByPath) -> list[Setting]:
    """Return the hosts, unless the user places this node: then each node starts its own pdrun."""
    if found.launcher == "ascend":
        # the operator starts every pod, or the user every host: pdrun starts no agent
        return [
            _make_setting("place.rank_table", found.path, found, "hosts"),
            _make_setting("place.launcher", "none", found, "hosts"),
        ]
    if any(path in given for path in (*_SCHEDULER_PATHS, "place.node_rank", "place.serve")):
        return []
    hosts = tuple(Host(host.name, where=found.sources.get("hosts", "")) for host in found.hosts)
    if len(hosts) < 2:
        return []
    return [_make_setting("hosts.all", hosts, found, "hosts"), *_job_name_settings(found)]


def _job_name_settings(found: LauncherInfo) -> list[Setting]:
    if not found.job_name:
        return []
    return [_make_setting("job", found.job_name, found, "job_id")]


def _task_settings(found: LauncherInfo, given: SettingsByPath, probes: Probes) -> list[Setting]:
    """Return the settings of an agent that the launcher started on every node."""
    if found.launcher in _WORKER_NAMES or found.launcher == "pet":
        return []  # inside a worker a separate job starts; PET_* variables are read as options
    if found.launcher == "variables":
        return _hand_set_settings(found, given)
    if (found.local_size or 1) > 1 or (found.local_rank or 0) > 0:
        raise _several_tasks_error(found)
    nodes = found.nodes
    if nodes is None:
        if "resources.nodes" not in given:
            raise ConfigError(
                f"{found.title} does not give the number of nodes",
                where=found.sources.get("node_rank", ""),
                hint="set --nodes (PDRUN_NODES), or use --launcher none"
                " for a job on this node only",
            )
        nodes = int(given["resources.nodes"].value)
    elif "resources.nodes" in given and given["resources.nodes"].value != nodes:
        source = given["resources.nodes"].source
        raise source.make_error(
            f"{given['resources.nodes'].value} node(s), but {found.title} started {nodes}"
            f" ({found.sources.get('nodes')})",
            "remove it, or use --launcher none for a separate job",
        )
    derived = [_make_setting("resources.nodes", nodes, found, "nodes"), *_job_name_settings(found)]
    if found.servers and "resources.servers" not in given:
        servers = parse_servers(str(found.servers), found.sources.get("servers", ""))
        derived.append(_make_setting("resources.servers", servers, found, "servers"))
    if found.workers_per_node and "resources.devices" not in given:
        derived.append(
            _make_setting("resources.devices", found.workers_per_node, found, "workers_per_node")
        )
    if nodes == 1:
        return derived
    if found.node_rank is not None:
        derived.append(_make_setting("place.node_rank", found.node_rank, found, "node_rank"))
    if found.has_own_scheduler:
        derived.append(
            _make_setting("place.serve", False, found, "head")
        )  # the scheduler runs in a separate pod
    if not any(path in given for path in _SCHEDULER_PATHS):
        derived += _scheduler_settings(found, given, probes)
    return derived


def _hand_set_settings(found: LauncherInfo, given: SettingsByPath) -> list[Setting]:
    """
    Return nodes and node rank that a script has exported for torchrun (NNODES, NODE_RANK).

    RANK and WORLD_SIZE may count nodes or workers. Without a number of nodes they are refused.
    """
    derived: list[Setting] = []
    has_place = any(path in given for path in _PLACE_PATHS)
    nodes = value_of(given, "resources.nodes", None)
    if nodes is None and not has_place and found.nodes is not None:
        nodes = found.nodes
        derived.append(_make_setting("resources.nodes", nodes, found, "nodes"))
    if nodes is not None:
        is_ranked = found.node_rank is not None and found.node_rank < nodes
        if nodes > 1 and is_ranked and not {"place.node_rank", "place.serve"} & {*given}:
            derived.append(_make_setting("place.node_rank", found.node_rank, found, "node_rank"))
        elif derived and nodes > 1:
            raise _lost_node_error(found, "NODE_RANK is not set")
        if derived and nodes > 1 and not found.head:
            raise _lost_node_error(found, "MASTER_ADDR is not set")
        return derived
    if has_place or (found.world == 1 and not found.node_rank):
        return []
    if found.rank is not None and found.world is None and not found.node_rank:
        raise ConfigError(
            "is not set, but RANK is",
            where="WORLD_SIZE",
            hint="unset the launcher's other variables, or use --launcher none",
        )
    if found.rank is None and found.world is None and not found.node_rank:
        return []  # NODE_RANK=0 alone: one node
    raise _lost_node_error(found, "")


def _lost_node_error(found: LauncherInfo, missing: str) -> ConfigError:
    """Return the error that variables set by hand do not place this node in its job."""
    if missing:
        what = f"is {found.nodes}, but {missing}"
        where = found.sources.get("nodes", "")
    elif found.rank is not None:
        what = (
            f"is {found.rank} of WORLD_SIZE={found.world}, set by hand,"
            " but pdrun assigns ranks itself"
        )
        where = "RANK"
    else:
        count = "" if found.world is None else f" with WORLD_SIZE={found.world}"
        what = f"is {found.node_rank}{count}, set by hand, but the number of nodes is not set"
        where = "NODE_RANK"
    return ConfigError(
        what,
        where=where,
        hint="set --nodes, --node-rank and --scheduler, or use --launcher none"
        " for a job on this node only",
    )


def _several_tasks_error(found: LauncherInfo) -> ConfigError:
    count = "several tasks"
    if found.local_size:
        count = f"{found.local_size} tasks"
    advice = "start one task per node"
    command = _ONE_TASK_COMMANDS.get(found.launcher, "")
    if found.launcher == "slurm-step" and found.nodes:
        # in a batch script, srun takes its number of tasks from SLURM_NTASKS
        command = f"srun --nodes={found.nodes} --ntasks={found.nodes} --ntasks-per-node=1"
    if command:
        advice += f" ({command})"
    return ConfigError(
        f"{found.title} started {count} on this node, but pdrun needs one task per node",
        where=found.sources.get("local_size") or found.sources.get("local_rank", ""),
        hint=f"{advice}, or run the script directly with pdrun.init() in it;"
        " --launcher none makes each task a separate job",
    )


def _first_host(found: LauncherInfo) -> str:
    """
    Return the first host on which tasks run.

    LSF lists the host of the batch script before the hosts on which jsrun starts tasks.
    """
    names = [host.name for host in found.hosts]
    if found.launcher == "jsrun" and len(names) > 1:
        has_batch_host = found.nodes is not None and len(names) == found.nodes + 1
        if has_batch_host or names[0].startswith(("batch", "login")):
            return names[1]
    return names[0]


def _scheduler_settings(
    found: LauncherInfo, given: SettingsByPath, probes: Probes
) -> list[Setting]:
    """
    Return the scheduler's address.

    The host is the first of the list, or the host of mpirun. The port is the launcher's, or it is
    derived from the job name. A launcher that gives the port of torch's store has none for it.
    """
    key = "hosts" if found.hosts else "head"
    host = _first_host(found) if found.hosts else found.head
    if not host:
        raise ConfigError(
            f"{found.title} does not give the address of node 0",
            where=found.sources.get("node_rank", ""),
            hint="set --scheduler HOST:PORT (PDRUN_SCHEDULER) to the same value on all nodes",
        )
    try:
        check_host_name(host, found.sources.get(key, ""))
    except UsageError as error:
        raise ConfigError(error.what, where=error.where, hint=error.hint) from None
    if found.launcher in _MPI_NAMES and found.node_rank == 0 and not probes.is_here(host):
        raise ConfigError(
            f"node 0 is {probes.hostname}, but the other nodes would connect to {host}",
            where=found.sources.get(key, ""),
            hint="set --scheduler HOST:PORT (PDRUN_SCHEDULER) to the same value on all nodes",
        )
    derived = [_make_setting("scheduler.host", host, found, key)]
    if found.sources.get("port") == "MASTER_PORT":
        return derived  # the port of the store, from which `combine` computes the scheduler's
    if found.port is not None:
        return [*derived, _make_setting("scheduler.port", found.port, found, "port")]
    name = found.job_name or f"{found.launcher}-{found.world}"
    port = port_for_job(name, value_of(given, "place.port_range", None))
    return [*derived, _make_setting("scheduler.port", port, found, "job_id")]
