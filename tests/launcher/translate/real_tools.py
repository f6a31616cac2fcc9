"""
What the real tools make of a command line. Each needs its package; no process is started.

horovod needs no build: the folder of its source distribution in PYTHONPATH is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.launcher.translate.shapes import JobShape


def torchrun_shape(words: Sequence[str], *, is_launch: bool = False) -> JobShape:
    """Return what torchrun or torch.distributed.launch would start. Needs torch."""
    from torch.distributed import run

    parser = run.get_args_parser()
    if is_launch:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.set_defaults(node_rank=None)
    args = parser.parse_args(list(words))
    shape = shape_of_torchrun_arguments(args)
    local_rank = is_launch and not args.use_env
    shape.argv = torchrun_argv(args, "--local-rank=N" if local_rank else "")
    return shape


def shape_of_torchrun_arguments(args: Any) -> JobShape:
    """Return ranks and addresses of torchrun's parsed arguments."""
    from torch.distributed import run

    least, most = run.parse_min_max_nnodes(args.nnodes)
    nodes = str(most) if least == most else f"{least}:{most}"
    if args.standalone:
        return JobShape("1", args.nproc_per_node, restarts=args.max_restarts, role=args.role)
    endpoint = args.rdzv_endpoint
    if args.rdzv_backend == "static":
        endpoint = endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    elif endpoint and ":" not in endpoint:
        endpoint += ":29400"
    if nodes == "1":
        port = endpoint.rpartition(":")[2]
        is_free = args.rdzv_backend == "c10d" or (not args.rdzv_endpoint and not args.master_port)
        endpoint = "" if is_free or port == "0" else f":{port}"
    return JobShape(
        nodes=nodes,
        workers=args.nproc_per_node,
        node_rank=args.node_rank if nodes != "1" else None,
        meet=endpoint,
        restarts=args.max_restarts,
        role=args.role,
    )


def torchrun_argv(args: Any, local_rank: str = "") -> list[str]:
    """Return a worker's command line, as config_from_args builds it, without ``-u``."""
    from torch.distributed.elastic.utils import macros

    argv = [] if args.no_python else ["python", *(["-m"] if args.module else [])]
    local = [local_rank] if local_rank else []
    words = [*argv, args.training_script, *local, *args.training_script_args]
    return macros.substitute(words, "N")


def accelerate_shape(words: Sequence[str]) -> JobShape:
    """Return what accelerate launch would start on machines with enough GPUs."""
    import os
    from unittest import mock

    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    args = launch.launch_command_parser().parse_args(list(words))
    with mock.patch.dict(os.environ, clear=True):
        args, defaults, precision_from_file = launch._validate_launch_command(args)
        asked_rank = args.machine_rank
        asked_port = args.main_process_port
        multi = args.num_processes > 1 or args.num_machines > 1
        if args.use_deepspeed:
            fields = list(defaults.deepspeed_config) if defaults else []
            fields += ["mixed_precision"] if precision_from_file else []
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            args.deepspeed_multinode_launcher = "standard"
            _, env = prepare.prepare_deepspeed_cmd_env(args)
        elif multi:
            env = prepare.prepare_multi_gpu_env(args)
        else:
            _, env = prepare.prepare_simple_launcher_cmd_env(args)
            args.nproc_per_node, args.nnodes = "1", "1"
    shape = JobShape(
        nodes=str(args.num_machines),
        workers=args.nproc_per_node,
        node_rank=int(asked_rank) if args.num_machines > 1 else None,
        meet=_accelerate_address(args, asked_port if multi else None),
        restarts=args.max_restarts,
        role=args.role,
        devices=env.pop("CUDA_VISIBLE_DEVICES", ""),
    )
    shape.argv = torchrun_argv(args)
    shape.variables = _accelerate_variables(env)
    return shape


def list_options(parse: Callable[[], object]) -> dict[str, bool]:
    """
    Return the options of a launcher: each name, and whether it takes a value.

    ``parse`` parses no words with the launcher's own parser.
    """
    import argparse
    from unittest import mock

    parsers: list[argparse.ArgumentParser] = []

    def catch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parsers.append(parser)
        raise SystemExit

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", catch),
        contextlib.suppress(SystemExit),
    ):
        parse()
    return {
        name: action.nargs != 0
        for action in parsers[0]._actions
        if not isinstance(action, argparse._HelpAction)
        for name in action.option_strings
    }


def _accelerate_address(args: Any, port: int | None) -> str:
    if args.num_machines == 1:
        return f":{port}" if port not in (None, 0) else ""
    if getattr(args, "rdzv_endpoint", ""):
        return str(args.rdzv_endpoint)
    return f"{args.master_addr}:{args.master_port}"


def _accelerate_variables(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that differ from what the library does without them."""
    found = {
        name: value
        for name, value in env.items()
        if name.startswith(("ACCELERATE_", "FSDP_")) and value
    }
    if found.get("ACCELERATE_DYNAMO_BACKEND") == "NO":
        found = {name: value for name, value in found.items() if "DYNAMO" not in name}
    for name, value in (("ACCELERATE_MIXED_PRECISION", "no"), ("ACCELERATE_USE_CPU", "False")):
        if found.get(name) == value:
            del found[name]
    return found


def deepspeed_shape(words: Sequence[str], launcher: Any, gpus: int = 8) -> JobShape:
    """
    Return what deepspeed would start. ``launcher`` is deepspeed.launcher.runner.

    gpus: number of GPUs of this machine.
    """
    args = launcher.parse_args(list(words))
    pool = launcher.fetch_hostfile(args.hostfile)
    is_here = not pool
    resources = launcher.parse_inclusion_exclusion(
        pool or {"localhost": gpus}, args.include, args.exclude
    )
    resources = launcher.apply_num_nodes_and_gpus(resources, args.num_nodes, args.num_gpus)
    argv = [] if args.no_python else ["python", *(["-m"] if args.module else [])]
    local = [] if args.no_local_rank else ["--local_rank=N"]
    shape = JobShape(argv=[*argv, args.user_script, *local, *args.user_args])
    if is_here:
        shape.workers = str(len(resources["localhost"]))
        if not (args.include or args.num_gpus > 0):
            shape.workers = "gpu"
        if args.include and ":" in args.include:
            shape.devices = ",".join(map(str, resources["localhost"]))
        shape.meet = f":{args.master_port}" if args.master_port != 29500 else ""
        return shape
    shape.workers = "-"
    shape.nodes = ",".join(f"{host}:{len(slots)}" for host, slots in resources.items())
    if any(list(slots) != list(range(len(slots))) for slots in resources.values()):
        shape.nodes = "@".join(
            f"{host}:{','.join(map(str, slots))}" for host, slots in resources.items()
        )
    if args.no_ssh:
        shape.node_rank = args.node_rank
        shape.meet = f"{args.master_addr}:{args.master_port}"
    return shape


def msrun_shape(words: Sequence[str], run: Any, entity: Any) -> JobShape:
    """
    Return what msrun would start.

    ``run`` is mindspore.parallel.cluster.run, ``entity`` the module of its commands.
    """
    import sys
    from unittest import mock

    with mock.patch.object(sys, "argv", ["msrun", *words]):
        args = run.get_args()
    nodes = args.worker_num // args.local_worker_num
    command = entity._generate_cmd_args_list(args.task_script, args.task_script_args)
    argv = [word for word in command if word != "-u"]  # msrun's workers are unbuffered anyway
    has_rank = nodes > 1 and args.node_rank >= 0
    return JobShape(
        nodes=str(nodes),
        workers=str(args.local_worker_num),
        node_rank=args.node_rank if has_rank else None,
        meet=f"{args.master_addr}:{args.master_port}" if nodes > 1 else "",
        argv=argv,
    )


def horovod_shape(words: Sequence[str]) -> JobShape:
    """Return what horovodrun would start: its options, and hosts filled in their order."""
    import sys
    from unittest import mock

    from horovod.runner import launch

    with mock.patch.object(sys, "argv", ["horovodrun", *words]):
        args = launch.parse_args()
    return shape_of_hosts(args.hosts or "", args.hostfile, args.num_proc, args.command)


def shape_of_hosts(
    hosts: str, hostfile: str | None, total: int, command: Sequence[str]
) -> JobShape:
    """Return the shape of ``total`` processes on hosts that are filled in order."""
    pairs = []
    if hostfile:
        for line in Path(hostfile).read_text().splitlines():
            name, _, slots = line.partition(" slots=")
            pairs.append((name, int(slots)))
    for part in filter(None, hosts.split(",")):
        name, _, slots = part.partition(":")
        pairs.append((name, int(slots or 1)))
    argv = [word for word in command if word != "-u"]
    if not pairs:
        return JobShape("1", str(total), argv=argv)
    used = []
    for name, slots in pairs:
        count = min(slots, total)
        total -= count
        if count:
            used.append(f"{name}:{count}")
    if len(used) == 1 and used[0].startswith("localhost:"):
        return JobShape("1", used[0].partition(":")[2], argv=argv)
    return JobShape(",".join(used), "-", argv=argv)
