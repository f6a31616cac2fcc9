"""
mpirun and mpiexec of Open MPI, MPICH and Intel MPI.

Checked against the manuals of Open MPI 4.1 and 5.0, MPICH 4.0 and Intel MPI 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import int_parser, quote_text
from pdrun.launcher.hosts import selection
from pdrun.launcher.hosts.hostfile import read_hostfile
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import (
    ForeignCommand,
    ForeignOption,
    UnreadableOptionError,
    parse_table,
    read_command,
)

MPIRUN_TABLE = """
-n -np --n --np -c N
-H -host --host -hosts HOSTS
-hostfile --hostfile -machinefile --machinefile -f FILE
-npernode --npernode -N -ppn -perhost PER_NODE
-pernode --pernode
-prefix --prefix DIR
-rf -rankfile --rankfile FILE
-use-hwthread-cpus --use-hwthread-cpus
-print-rank-map
-map-by --map-by HOW
-rank-by --rank-by HOW
-bind-to --bind-to HOW
-x NAME
-mca --mca KEY VALUE
-gmca --gmca KEY VALUE
-prtemca --prtemca KEY VALUE
-genv NAME VALUE
-env NAME VALUE
-genvlist -envlist NAMES
-genvall -envall
-wdir --wdir -wd DIR
-allow-run-as-root --allow-run-as-root
-oversubscribe --oversubscribe
-nooversubscribe --nooversubscribe
-tag-output --tag-output
-timestamp-output --timestamp-output
-report-bindings --report-bindings
-display-map --display-map
-bynode --bynode
-byslot --byslot
-bind-to-core --bind-to-core
-bind-to-none --bind-to-none
-output-filename --output-filename DIR
-timeout --timeout S
-launcher LAUNCHER
-iface NAME
-l -prepend-rank
-q --quiet
-v --verbose
"""
SCRIPT_NOTE = (
    "workers get RANK, WORLD_SIZE and LOCAL_RANK: right for torch.distributed. A script that calls"
    " MPI or hvd.init() still needs its own launcher"
)
PER_NODE = "npernode"
"""Key of the options for the number of tasks per node."""


def mpirun_table() -> tuple[ForeignOption, ...]:
    """Return the options of mpirun, those of Open MPI with one dash or two."""
    return parse_table(MPIRUN_TABLE)


def translate_mpirun(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``mpirun WORDS`` or ``mpiexec WORDS``."""
    command = read_command("mpirun", mpirun_table(), words, abbreviates=False)
    if ":" in command.words:
        raise UsageError(
            "several programs, separated by ':', are not supported",
            where="mpirun",
            hint="start one program that chooses by its rank",
        )
    result = Translation("mpirun")
    command.refuse(_MPIRUN_HINTS)
    per_node = command.count_of(PER_NODE, int(command.has("pernode")))
    per_node = _read_mapping(command) or per_node
    if not _add_allocation(command, result, per_node, environ):
        add_hosts(command, result, command.count_of("np"), per_node)
    _add_binding(command, result)
    _add_variables(command, result)
    if folder := command.text_of("wdir"):
        result.add("--chdir", folder)
    if name := command.text_of("iface"):
        result.add("--interface", name)
    result.set_command(command.words)
    result.notes.append(SCRIPT_NOTE)
    result.left_out = command.list_left_out(_LEFT_OUT)
    return result


_MPIRUN_HINTS = {
    "output_filename": "use pdrun --log-dir DIR",
    "timeout": "use pdrun --time-limit S",
    "rankfile": "use pdrun --hostfile FILE, which reads the hosts of a rankfile",
    "launcher": "use pdrun --ssh PROGRAM, --launcher mpirun or --launcher srun",
    "genvlist": "use pdrun --forward NAMES",
}
"""Options without a translation, and what to use."""
_LEFT_OUT = {
    **dict.fromkeys(("mca", "gmca", "prtemca", "prefix"), "pdrun's workers do not use MPI"),
    "use_hwthread_cpus": "the number of workers is given",
    "oversubscribe": "pdrun has no limit of workers per core",
    "nooversubscribe": "the number of workers is given",
    "allow_run_as_root": "pdrun does not ask",
    "byslot": "pdrun numbers the ranks of a node in a row",
    "genvall": "workers on this host have all variables; name those for other hosts with --forward",
    **dict.fromkeys(
        ("print_rank_map", "display_map", "report_bindings"), "pdrun --explain prints the places"
    ),
    **dict.fromkeys(("tag_output", "prepend_rank"), "pdrun writes the rank in front of each line"),
    "timestamp_output": "pdrun writes no times; use pdrun logs",
    **dict.fromkeys(("quiet", "v"), "it concerns the messages of the launcher"),
}
"""Options without an effect under pdrun, and why."""


def _read_mapping(command: ForeignCommand) -> int:
    """Return the tasks per node of ``--map-by ppr:N:node``; refuse maps with another rank order."""
    for key in ("bynode", "rank_by"):
        if command.has(key) and command.text_of(key, "node") not in ("slot", "core", "hwthread"):
            raise command.make_error(
                key, "numbers ranks across nodes", "pdrun numbers the ranks of a node in a row"
            )
    how = command.text_of("map_by", "slot").lower()
    parts = how.split(":")
    if parts[0] == "ppr" and len(parts) >= 3 and parts[2] == "node":
        return int(int_parser(1)(parts[1], "--map-by"))
    if parts[0] in ("slot", "core", "hwthread", "numa", "socket", "package"):
        return 0
    raise command.make_error(
        "map_by",
        f"{quote_text(how)} is not supported",
        "use ppr:N:node, or hosts with numbers: pdrun --hosts a:4,b:4",
    )


def _add_allocation(
    command: ForeignCommand, result: Translation, per_node: int, environ: Mapping[str, str]
) -> bool:
    """Add the nodes of an allocation, which mpirun uses; return whether there is one."""
    if any(command.has(key) for key in ("hosts", "machinefile")):
        return False
    total = command.count_of("np")
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    if nodes.isdecimal() and int(nodes) > 1:
        workers = per_node or total // int(nodes)
        if not workers or (total and total != workers * int(nodes)):
            raise UsageError(
                f"the tasks do not fill the {nodes} nodes of the allocation evenly",
                where="mpirun",
                hint="write pdrun --devices N, for N workers on each of its nodes",
            )
        result.add("--nodes", nodes, "--devices", str(workers))
        return True
    found = next((name for name in _ALLOCATION_FILES if name in environ), "")
    if found:
        raise UsageError(
            f"mpirun uses the hosts of {found}, and their slots",
            where="mpirun",
            hint="write pdrun --devices N, for N workers on each host of the allocation",
        )
    return False


_ALLOCATION_FILES = ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


def add_hosts(command: ForeignCommand, result: Translation, total: int, per_node: int) -> None:
    """Add the hosts, each with the number of workers that the launcher starts there."""
    hosts = _read_hosts(command)
    if not hosts:
        if per_node and total and total != per_node:
            result.add("--nodes", str(_divide(command, total, per_node)))
            result.add("--devices", str(per_node))
            return
        workers = total or per_node
        if not workers:
            raise UnreadableOptionError("-np is required", where=command.launcher)
        result.add("--nodes", "1", "--devices", str(workers))
        return
    used = _fill_hosts(command, hosts, total, per_node)
    if len(used) == 1 and used[0][0].name in ("localhost", "127.0.0.1"):
        result.add("--nodes", "1", "--devices", str(used[0][1]))
        return
    result.add_hosts(used)


def _read_hosts(command: ForeignCommand) -> tuple[Host, ...]:
    """Return the listed hosts; a name that is repeated adds up, as with mpirun."""
    if path := command.text_of("machinefile", command.text_of("hostfile")):
        return read_hostfile(path)
    text = command.text_of("hosts")
    if not text:
        return ()
    found: dict[str, Host] = {}
    for word in text.split(","):
        for host in selection.parse_host_item(word, f"{command.launcher}: hosts"):
            slots = host.devices or 1
            if host.name in found:
                slots += found[host.name].devices or 1
            found[host.name] = Host(host.name, slots, user=host.user)
    return tuple(found.values())


def _fill_hosts(
    command: ForeignCommand, hosts: Sequence[Host], total: int, per_node: int
) -> list[tuple[Host, int]]:
    """Return the hosts that are used, in order, each with its number of workers."""
    slots = [per_node or host.devices or 1 for host in hosts]
    left = total or sum(slots)
    if left > sum(slots):
        raise UsageError(
            f"{total} processes, but the hosts have {sum(slots)} slots",
            where=command.launcher,
            hint="write the numbers of the hosts: pdrun --hosts a:4,b:4",
        )
    used = []
    for host, count in zip(hosts, slots, strict=True):
        taken = min(count, left)
        left -= taken
        if taken:
            used.append((host, taken))
    return used


def _divide(command: ForeignCommand, total: int, per_node: int) -> int:
    if total % per_node:
        raise UsageError(
            f"{total} processes cannot be divided into nodes of {per_node}",
            where=command.launcher,
        )
    return total // per_node


def _add_binding(command: ForeignCommand, result: Translation) -> None:
    modes = {"core": "cores", "none": "none", "numa": "numa", "hwthread": "cores"}
    how = command.text_of("bind_to")
    if command.has("bind_to_core"):
        how = "core"
    if command.has("bind_to_none"):
        how = "none"
    if not how:
        return
    if how not in modes:
        raise command.make_error(
            "bind_to", f"{quote_text(how)} is not supported", "use pdrun --bind cores, numa or none"
        )
    result.add("--bind", modes[how])


def _add_variables(command: ForeignCommand, result: Translation) -> None:
    """Add variables for the workers, and the names of those that other hosts get."""
    names = []
    for (text,) in command.all_of("x"):
        for part in text.split(","):
            if "=" in part:
                result.add("--env", part)
            else:
                names.append(part)
    for key in ("genv", "env"):
        for name, value in command.all_of(key):
            result.add("--env", f"{name}={value}")
    if names:
        result.add("--forward", ",".join(dict.fromkeys(names)))
