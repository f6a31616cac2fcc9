"""
deepspeed, the launcher of DeepSpeed.

Checked against DeepSpeed 0.19 (launcher/runner.py, launcher/launch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdrun.launcher.common.files import path_exists
from pdrun.launcher.hosts import selection
from pdrun.launcher.hosts.hostfile import read_hostfile
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import (
    ForeignCommand,
    choice_of,
    parse_table,
    read_command,
)

DEEPSPEED_TABLE = """
-H --hostfile FILE
-i --include HOSTS
-e --exclude HOSTS
--num_nodes N
--num_gpus --num_accelerators N
--master_port PORT
--master_addr HOST
--node_rank N
--launcher NAME
--launcher_args TEXT
--module
--no_python
--no_local_rank
--no_ssh
--no_ssh_check
--force_multi
--save_pid
--enable_each_rank_log DIR
--autotuning HOW
--bind_cores_to_rank
--bind_core_list CORES
--ssh_port PORT
--venv_script FILE
--log_level LEVEL
-q --quiet
"""
_HINTS = {
    "autotuning": "run deepspeed for it",
    "venv_script": "use --python with the interpreter of the environment",
    "bind_core_list": "use --bind cores, or taskset in front of pdrun",
    "launcher_args": "use --mpirun-opts or --srun-opts",
    "save_pid": "pdrun lists its jobs: use pdrun status and pdrun stop",
}
"""Options without a translation, and what to use."""
_LEFT_OUT = {
    "no_ssh_check": "pdrun logs in to each host once",
    "force_multi": "the number of hosts makes no difference for pdrun",
    "log_level": "it concerns the messages of the launcher",
    "quiet": "it concerns the messages of the launcher",
}
"""Options without an effect under pdrun, and why."""
_LEFT_OUT_HERE = dict.fromkeys(
    ("master_addr", "launcher", "ssh_port", "no_ssh", "node_rank"),
    "without a host file, deepspeed runs on this machine only",
)
DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = "29500"
THIS_HOST = "localhost"


def translate_deepspeed(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``deepspeed WORDS``. Workers get ``--local_rank=N`` unless --no_local_rank."""
    command = read_command("deepspeed", parse_table(DEEPSPEED_TABLE), words)
    _check_supported(command)
    result = Translation("deepspeed")
    hosts = _read_hosts(command, result)
    reasons = _LEFT_OUT
    if hosts is None:
        _add_this_host(command, result)
        reasons = {**_LEFT_OUT, **_LEFT_OUT_HERE}
    else:
        _add_hosts(command, result, hosts)
    if folder := command.text_of("enable_each_rank_log", "None"):
        result.add_unless_default("--log-dir", folder, "None")
    if command.has("bind_cores_to_rank"):
        result.add("--bind", "cores")
    if not command.has("no_local_rank"):
        result.add("--local-rank-arg", "local_rank")
    result.set_program(
        command.words, is_module=command.has("module"), is_command=command.has("no_python")
    )
    result.left_out = command.list_left_out(reasons)
    return result


def _check_supported(command: ForeignCommand) -> None:
    command.refuse(_HINTS)
    filters = [key for key in ("include", "exclude") if command.has(key)]
    counts = [key for key in ("num_nodes", "num_gpus", "num_accelerators") if command.has(key)]
    if filters and (counts or len(filters) > 1):
        raise command.make_error(
            filters[0], f"excludes --{(counts or filters)[-1]}, as with deepspeed", "remove one"
        )


def _read_hosts(command: ForeignCommand, result: Translation) -> tuple[Host, ...] | None:
    """Return the hosts of the host file; None: this machine only."""
    path = command.text_of("hostfile", DEFAULT_HOSTFILE)
    if not path_exists(path):
        if command.has("hostfile"):
            raise command.make_error(
                "hostfile",
                f"{path} does not exist: deepspeed would run on this machine only",
                "correct the path, or leave --hostfile out",
            )
        return None
    if not command.has("hostfile"):
        result.notes.append(f"with the hosts of {path}, deepspeed's default")
    return read_hostfile(path)


def _add_this_host(command: ForeignCommand, result: Translation) -> None:
    """Add the workers of a job on this machine."""
    if command.count_of("num_nodes", -1, least=-1) > 1:
        raise command.make_error(
            "num_nodes", "needs a host file for more than one node", "add --hostfile"
        )
    result.add("--nodes", "1")
    nothing: selection.HostChoice = {}
    chosen = command.parse("include", selection.parse_host_choice, nothing)
    removed = command.parse("exclude", selection.parse_host_choice, nothing)
    for name in (*chosen, *removed):
        if name != THIS_HOST:
            raise command.make_error(
                "include" if chosen else "exclude",
                f"{name} is not {THIS_HOST}, and there is no host file",
                "add --hostfile",
            )
    if removed:
        raise command.make_error(
            "exclude",
            "removes devices of this machine, whose number is not known here",
            "list the others: CUDA_VISIBLE_DEVICES=0,1 pdrun --devices 2",
        )
    indices = chosen.get(THIS_HOST, ())
    workers = command.count_of("num_accelerators", -1, least=-1)
    if indices:
        result.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        result.add("--devices", str(len(indices)))
    elif workers > 0:
        result.add("--devices", str(workers))
    else:
        result.add("--nproc-per-node", "gpu")
    port = command.text_of("master_port", DEFAULT_PORT)
    result.add_unless_default("--master-port", port, DEFAULT_PORT)


def _add_hosts(command: ForeignCommand, result: Translation, hosts: tuple[Host, ...]) -> None:
    """Add the hosts that deepspeed would use."""
    nodes = command.count_of("num_nodes", -1, least=-1)
    workers = command.count_of("num_accelerators", -1, least=-1)
    if workers > 0 or nodes > 0:
        # --num_gpus counts on every host, whatever its slots are
        used = hosts[:nodes] if nodes > 0 else hosts
        counts = [workers if workers > 0 else host.devices or 1 for host in used]
        result.add_hosts(zip(used, counts, strict=True))
    else:
        result.add("--hostfile", command.text_of("hostfile", DEFAULT_HOSTFILE))
        for key in ("include", "exclude"):
            if chosen := command.text_of(key):
                result.add(f"--{key}", chosen)
    _add_meeting(command, result)


def _add_meeting(command: ForeignCommand, result: Translation) -> None:
    launcher = command.parse(
        "launcher", choice_of("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"), "pdsh"
    )
    if command.has("no_ssh"):
        result.add("--launcher", "none")
        result.add("--node-rank", str(command.count_of("node_rank", -1, least=0)))
    elif launcher == "slurm":
        result.add("--launcher", "srun")
    elif launcher != "pdsh":
        result.add("--launcher", "mpirun")
    if port := command.text_of("ssh_port"):
        result.add("--ssh-opts", f"-p {port}")
    if host := command.text_of("master_addr", may_be_empty=True):
        result.add("--master-addr", host)
    if port := command.text_of("master_port"):
        result.add("--master-port", port)
