"""The options of torchrun and msrun give the same job as pdrun's own options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from pdrun.errors import ConfigError, PdrunError
from pdrun.launcher.adapters.model import Probes
from pdrun.launcher.cli.run import parse_request, run_command
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.msrun_options import MSRUN_OPTIONS
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS


def resolve_line(
    line: str, environ: Mapping[str, str] | None = None, probes: Probes | None = None
) -> ResolvedSpec:
    """Return what a command line asks for, without looking at any machine."""
    context = run_command().make_context("run", shlex.split(line))
    words = context.params.pop("words")
    return parse_request(context.params, words, environ or {}, probes).resolved


SAME = [
    (
        "--nnodes 2 --rdzv-endpoint h:1 x",
        "--nodes 2 --scheduler h:10001 --master-addr h --master-port 1 x",
    ),
    (
        "--nnodes=2:2 --master_addr h --master_port 1 x",
        "--nodes 2 --scheduler h:10001 --master-addr h --master-port 1 x",
    ),
    ("--nnodes 2 --master-addr h x", "--nodes 2 --scheduler h:19500 --rdzv-endpoint h:29500 x"),
    ("--nnodes 2 --rdzv-endpoint h x", "--nodes 2 --scheduler h:19400 --rdzv-endpoint h:29400 x"),
    ("--nproc-per-node 4 x", "--devices 4 x"),
    ("--nproc_per_node=4 x", "--devices 4 x"),
    ("--rdzv-id 101 x", "--job 101 x"),
    ("--rdzv-id none x", "x"),
    (
        "--rdzv-backend c10d --monitor-interval 5 --start-method fork --event-log-handler null x",
        "x",
    ),
    (
        "--nnodes 2 --rdzv-conf join_timeout=60,is_host=1,last_call_timeout=5 x",
        "--nodes 2 --start-timeout 60 --serve x",
    ),
    ("--rdzv-conf timeout=900 x", "--start-timeout 15m x"),
    ("--rdzv_conf read_timeout=900,close_timeout=30,use_libuv=0,store_type=tcp x", "x"),
    ("--rdzv_conf= --rdzv_endpoint= --rdzv_id= --local-ranks-filter= x", "x"),
    ("--monitor_interval 0 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT --use_env x", "x"),
    ("--nnodes 2 --rdzv_endpoint h:5 --master_port 7 x", "--nnodes 2 --rdzv_endpoint h:5 x"),
    ("--master_port 0 x", "x"),
    (
        "--nnode 2 --nproc-p=4 --master_a h --max-r 3 x",
        "--nodes 2 --devices 4 --master-addr h --max-restarts 3 x",
    ),
    ("--worker_n 4 --local_w 2 --master_addr h x", "--nodes 2 --devices 2 --scheduler h:8118 x"),
    ("--launch-compat x -a", "--local-rank-arg local-rank x -a"),
    ("--launch-compat --use-env x -a", "x -a"),
    (
        "--nnodes 2:4 --rdzv-endpoint h:1 x",
        "--nodes 2:4 --grow 30s --scheduler h:10001 --rdzv-endpoint h:1 x",
    ),
    (
        "--nnodes 2:4 --rdzv-endpoint h:1 --rdzv-conf last_call_timeout=5 --grow 9 x",
        "--nodes 2:4 --grow 9 --gather 5 --scheduler h:10001 --rdzv-endpoint h:1 x",
    ),
    ("--standalone x", "--nodes 1 x"),
    ("--standalone --rdzv-backend c10d --rdzv-endpoint localhost:0 x", "--nodes 1 x"),
    ("--standalone --master-addr h --master-port 29500 x", "--nodes 1 x"),
    (
        "--shutdown-timeout 5 --max_restarts 3 --log_dir d --local-addr eth0 x",
        "--grace 5s --max-restarts 3 --log-dir d --interface eth0 x",
    ),
    ("--role trainer x", "--env ROLE_NAME=trainer x"),
    ("--numa-binding node x", "--bind numa x"),
    ("--no_python x -a", "--no-python x -a"),
    ("--module x.y -a", "-m x.y -a"),
    ("--tee 3 x", "x"),
    ("--redirects 3 x", "--show-ranks none x"),
    ("-r 3 -t 3 x", "x"),
    ("-r 2 x", "--show-stderr none x"),
    ("-r 1 x", "--show-ranks none --show-stderr all x"),
    ("-r 3 -t 2 x", "--show-ranks none --show-stderr all x"),
    ("-r 3 -t 0:1 --nproc-per-node 2 x", "--devices 2 --show-ranks 0 --show-stderr none x"),
    ("-r 0:1,1:2 --nproc-per-node 3 x", "--devices 3 --show-ranks 1-2 --show-stderr 0,2 x"),
    ("-r 3 -t 0:3,11:3 x", "--show-ranks 0,11 x"),
    ("-r 1:3 --nproc-per-node 3 x", "--devices 3 --show-ranks 0,2 x"),
    ("-r 3 -t 0:3 --nnodes 2 --nproc-per-node 4 x", "--nodes 2 --devices 4 --show-ranks 0,4 x"),
    ("--local-ranks-filter 0,1 x", "--show-ranks 0-1 x"),
    ("--local-ranks-filter 0,1 -r 0:3 --nproc-per-node 4 x", "--devices 4 --show-ranks 1 x"),
    (
        "--worker_num 8 --local_worker_num 4 --master_addr h x",
        "--nodes 2 --devices 4 --scheduler h:8118 x",
    ),
    ("--worker_num 16 x", "--nodes 2 --devices 8 x"),
    ("--worker_num 4 --nodes 2 x", "--nodes 2 --devices 2 x"),
    ("--local_worker_num 8 --node_rank -1 x", "--nodes 1 --devices 8 x"),
    ("--cluster_time_out 60 --bind_core True --join True x", "--start-timeout 60 --bind cores x"),
    ("--bind_core False --bind_numa True x", "--bind numa x"),
    ("--bind_core False x", "--bind none x"),
    (
        """--bind_core '{"scheduler":["9"],"device0":["1-3","0"],"device1":["4-5"]}' x""",
        "--bind 0-3/4-5 x",
    ),
    (
        "--worker_log_name w_{ip} --tail_worker_log -1 x",
        "--log-name w_{ip}_{rank} --show-ranks all x",
    ),
    ("--tail_worker_log 0,3 x", "--show-ranks 0,3 x"),
    (
        "--nodes 2 --nnodes 2 --scheduler h:1 --master-addr h --master-port 1 x",
        "--nodes 2 --scheduler h:1 x",
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME, ids=[theirs for theirs, _ in SAME])
def test_an_alias_gives_the_same_job(theirs: str, ours: str) -> None:
    assert resolve_line(theirs).spec == resolve_line(ours).spec


REFUSED = [
    ("-r 3 -t 0:3 --nnodes 2 x", "names local ranks of several nodes"),
    ("--worker_num 8 --local_worker_num 4 --nodes 3 x", "--worker_num 8 contradicts --nodes 3"),
    (
        "--worker_num 8 --local_worker_num 4 --devices 2 x",
        "--local_worker_num 4 contradicts --devices 2",
    ),
    ("--nproc-per-node cpu --backend cuda x", "contradicts"),
    ("-r 3 --show-ranks 0 x", "contradicts"),
    ("-r 2 --show-stderr 0 x", "contradicts"),
    ("--launch-compat --local-rank-arg local_rank x", "contradicts"),
    ("--local-rank-arg '' x", "--local-rank-arg: is empty"),
    ("--local-rank-arg = x", "is not the name of an option"),
    ("--rdzv_conf store_type=file x", "is not supported"),
    ("--nnodes 2 --log-name {local_rank} x", "gives the same file names on every node"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_contradicting_options_are_refused(line: str, message: str) -> None:
    with pytest.raises(PdrunError, match=message):
        resolve_line(line)


def test_every_option_is_accepted_or_refused_with_a_reason() -> None:
    numbers = ["1", "1s", "2:2", "0,1", "-1"]
    samples = [
        *numbers,
        "h:1",
        "h",
        "True",
        "node",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "c10d",
        "spawn",
        "null",
        "join_timeout=1",
        "name",
    ]
    for row in ALIAS_OPTIONS:
        outcomes = set()
        for text in samples if row.metavar else ("",):
            try:
                row.read(text, row.names[0])
                outcomes.add("taken")
            except PdrunError as error:
                outcomes.add("refused" if "is not supported" in str(error) else "misspelt")
        assert "taken" in outcomes or (outcomes == {"refused"} and row.help == "refused"), row.names


def test_torchrun_options_have_both_names_and_a_variable() -> None:
    for row in TORCHRUN_OPTIONS:
        long = [name for name in row.names if name.startswith("--")]
        assert {name.replace("-", "_") for name in long} == {long[0].replace("-", "_")}
        assert row.env == (f"PET_{long[0][2:].upper().replace('-', '_')}",)
    shared = {twin for row in RUN_OPTIONS for twin in row.env if twin.startswith("PET_")}
    assert shared == {
        "PET_MODULE",
        "PET_NO_PYTHON",
        "PET_NODE_RANK",
        "PET_MAX_RESTARTS",
        "PET_LOG_DIR",
    }


@pytest.mark.torch
def test_all_options_of_torchrun_are_known() -> None:
    distributed = pytest.importorskip("torch.distributed.run")
    known = {name for row in (*RUN_OPTIONS, *TORCHRUN_OPTIONS) for name in row.names} | {
        "-h",
        "--help",
    }
    theirs = {
        name for action in distributed.get_args_parser()._actions for name in action.option_strings
    }
    assert theirs <= known


def test_variables_of_torchrun_are_read() -> None:
    asked = resolve_line(
        "x",
        {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:1", "PET_TEE": "3", "PET_MAX_RESTARTS": "2"},
    )
    assert asked.spec.resources.nodes == 2
    assert str(asked.spec.place.scheduler) == "h:10001"
    assert asked.sources["policy.max_restarts"] == "PET_MAX_RESTARTS"


def test_the_command_line_overrides_variables_of_pdrun_and_torchrun() -> None:
    asked = resolve_line("--nodes 1 x", {"PET_NNODES": "2", "PDRUN_GRACE": "5"})
    assert asked.spec.resources.nodes == 1
    assert asked.notes == ("PET_NNODES=2 is overridden by --nodes 1",)


def test_msrun_options_have_the_names_of_msrun() -> None:
    assert all(len(row.names) == 1 and "-" not in row.names[0][2:] for row in MSRUN_OPTIONS)


def test_an_endpoint_beside_standalone_is_noted() -> None:
    asked = resolve_line("--standalone --rdzv-endpoint localhost:0 x")
    assert asked.spec.place.scheduler is None
    assert "--rdzv-endpoint localhost:0 is not used: --standalone runs one node" in asked.notes


@pytest.mark.parametrize(
    ("line", "environ", "scheduler", "store"),
    [
        ("--master-port 29517 x", {}, None, ":29517"),
        ("--rdzv-endpoint h:29517 x", {}, None, "h:29517"),
        ("--rdzv-endpoint localhost:0 x", {}, None, "localhost:0"),
        ("x", {"MASTER_PORT": "29517"}, None, ":29517"),
        ("x", {"MASTER_ADDR": "h"}, None, "h:0"),
        ("--master-port 1 x", {"MASTER_ADDR": "h", "MASTER_PORT": "2"}, None, "h:1"),
        ("--nodes 2 --scheduler h:9 --master-port 1 x", {}, "h:9", ":1"),
        ("--nodes 2 --scheduler h:9 x", {"MASTER_ADDR": "g", "MASTER_PORT": "1"}, "h:9", "g:1"),
        ("--nodes 2 x", {"MASTER_ADDR": "h", "MASTER_PORT": "29517"}, "h:19517", "h:29517"),
        ("--nodes 2 --local --master-port 1 x", {}, None, ":1"),
        ("--hosts a,b x", {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None, "a:1"),
        ("--hosts a,b --master-port 1 x", {}, None, ":1"),
        ("--nodes 2 --scheduler h:1 --master-port 1 x", {}, "h:1", None),
        ("--worker_num 8 --master_addr h --master_port 1 x", {}, None, None),
        ("--standalone --master-port 1 x", {"MASTER_PORT": "1"}, None, None),
        ("x", {"MASTER_PORT": "1", "PDRUN_GENERATION": "0"}, None, None),
        ("x", {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "j"}, None, None),
    ],
)
def test_the_store_listens_where_the_user_wants(
    line: str, environ: dict[str, str], scheduler: str | None, store: str | None
) -> None:
    place = resolve_line(line, environ).spec.place
    found = tuple(None if one is None else str(one) for one in (place.scheduler, place.store))
    assert found[1] == store
    if "worker_num" not in line:
        assert found[0] == scheduler


def test_a_malformed_variable_of_the_store_is_named() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT: '99999' is not a port"):
        resolve_line("x", {"MASTER_PORT": "99999"})
