"""Which job the variables of another launcher describe, and when they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import PdrunError
from pdrun.launcher.adapters.model import Probes
from pdrun.launcher.cli.run import parse_request, run_command
from pdrun.launcher.config.resolve import ResolvedSpec
from tests.launcher.config.test_aliases import resolve_line

HAND = {"NODE_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
LWS = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "LWS_LEADER_ADDRESS": "lws-0.lws.default",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "1",
}
MINDSPORE = {
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_WORKER_NUM": "16",
    "MS_LOCAL_WORKER": "8",
    "MS_NODE_RANK": "1",
}


def describe_place(found: ResolvedSpec) -> str:
    """Return nodes, this node's rank, devices per node and the scheduler."""
    place = found.spec.place
    resources = found.spec.resources
    return f"{resources.nodes} {place.node_rank} {resources.devices} {place.scheduler}"


@pytest.mark.parametrize(
    ("line", "environ", "job"),
    [
        ("--devices 8 x", {**HAND, "NNODES": "2"}, "2 1 8 h1:19500"),
        ("--nodes 2 --devices 8 x", HAND, "2 1 8 h1:19500"),
        ("--nodes 2 --node-rank 0 --scheduler h1:9 x", HAND, "2 0 auto h1:9"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint h1:9 x", {"RANK": "1"}, "2 1 auto h1:10009"),
        ("--nodes 1 x", {"WORLD_SIZE": "2"}, "1 None auto None"),
        ("--devices 2 x", {"WORLD_SIZE": "2"}, "1 None 2 None"),
        ("--launcher none x", {"NNODES": "2"}, "1 None auto None"),
        ("x", {"NODE_RANK": "0", "NNODES": "1"}, "1 None auto None"),
        ("x", {"NODE_RANK": "0"}, "1 None auto None"),
        ("x", {"NNODES": "2", "TORCHELASTIC_RUN_ID": "j"}, "1 None auto None"),
        ("x", MINDSPORE, "2 1 8 10.0.0.1:8118"),
        ("--devices 4 x", {**MINDSPORE, "MS_ROLE": "MS_WORKER"}, "2 1 4 10.0.0.1:8118"),
    ],
)
def test_variables_of_nodes_give_their_job(line: str, environ: dict[str, str], job: str) -> None:
    assert describe_place(resolve_line(line, environ)) == job


@pytest.mark.parametrize("index", [0, 1])
def test_a_user_may_run_the_scheduler_outside_of_nodes_that_a_launcher_numbers(index: int) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    found = resolve_line("--nodes 2 --scheduler h1:9 --no-serve x", environ)
    assert describe_place(found) == f"2 {index} auto h1:9"
    assert found.spec.place.serve is False
    with pytest.raises(PdrunError, match="contradicts"):
        resolve_line("--nodes 2 --scheduler h1:9 --no-serve --node-rank 0 x", environ)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_a_master_pod_with_a_loopback_address_is_reached_by_its_name(address: str) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}
    probes = Probes(hostname="master-0")
    found = resolve_line("x", {**pod, "MASTER_ADDR": address, "RANK": "0"}, probes)
    place = found.spec.place
    assert place.scheduler == Endpoint("master-0", 13456)
    assert place.store is not None and place.store.host != address and place.store.port == 23456
    with pytest.raises(PdrunError, match="this pod itself, but RANK is 1"):
        resolve_line("x", {**pod, "MASTER_ADDR": address, "RANK": "1"})
    alone = resolve_line("x", {**pod, "MASTER_ADDR": address, "RANK": "0", "WORLD_SIZE": "1"})
    assert alone.spec.resources.nodes == 1


def test_servers_of_a_launcher_are_those_of_the_job() -> None:
    environ = {**MINDSPORE, "MS_ROLE": "MS_WORKER", "MS_SERVER_NUM": "3"}
    assert resolve_line("x", environ).spec.resources.servers == "3"
    assert resolve_line("--servers 1/node x", environ).spec.resources.servers == "1/node"
    assert resolve_line("x", {**environ, "MS_SERVER_NUM": "0"}).spec.resources.servers == ""


@pytest.mark.parametrize("pod", [{}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}], ids=["", "pod"])
def test_a_master_port_is_the_stores_and_the_scheduler_is_in_the_range(pod: dict[str, str]) -> None:
    variables = {**HAND, "RANK": "1", "WORLD_SIZE": "2", "NNODES": "2", **pod}
    line = "--devices 8 --port-range 21000-21100 x"
    place = resolve_line(line, variables).spec.place
    by_options = resolve_line(f"--nodes 2 --master-addr h1 --master-port 29500 {line}").spec.place
    assert place.scheduler == by_options.scheduler == Endpoint("h1", 21021)
    assert place.store == by_options.store == Endpoint("h1", 29500)


PODS = {**HAND, "RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.mark.parametrize(
    ("environ", "options", "job", "store"),
    [
        (PODS, "", "2 1 8 h1:19500", "h1:29500"),
        (PODS, "--master-port 30100", "2 1 8 h1:20100", "h1:30100"),
        ({**PODS, "MASTER_PORT": "2222"}, "", "2 1 8 h1:12222", "h1:2222"),
        (LWS, "--master-port 30100", "4 1 8 lws-0.lws.default:*", "lws-0.lws.default:30100"),
        (PODS, "--scheduler h1:7", "2 1 8 h1:7", "h1:29500"),
    ],
)
def test_the_schedulers_port_follows_from_the_stores(
    environ: dict[str, str], options: str, job: str, store: str
) -> None:
    found = resolve_line(f"{options} --devices 8 x", environ)
    assert describe_place(found).startswith(job.removesuffix("*"))
    assert str(found.spec.place.store).rpartition(":")[2] == store.rpartition(":")[2]


def test_a_group_of_pods_is_one_job() -> None:
    found = resolve_line("--devices 8 x", LWS).spec
    assert (found.resources.nodes, found.place.node_rank) == (4, 1)
    assert found.place.scheduler is not None
    assert found.place.scheduler.host == "lws-0.lws.default"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (HAND, "NODE_RANK: is 1 with WORLD_SIZE=16, set by hand, but the number of nodes"),
        ({"NODE_RANK": "1"}, "NODE_RANK: is 1, set by hand, but the number of nodes is not set"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES: is 2, but MASTER_ADDR is not set"),
        ({"NNODES": "2", "RANK": "1", "MASTER_ADDR": "h"}, "NNODES: is 2, but NODE_RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK: is 1 of WORLD_SIZE=2, set by hand"),
        ({"RANK": "1"}, "WORLD_SIZE: is not set, but RANK is"),
        ({"WORLD_SIZE": "16", "MASTER_ADDR": "h"}, "WORLD_SIZE: is 16, but no launcher's"),
        ({"NNODES": "2"}, "NNODES: is 2, but no launcher's variables"),
        ({"NUM_NODES": "2"}, "NUM_NODES: is 2, but no launcher's variables"),
        ({"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINERS_NUM: is 2"),
        ({"PADDLE_NNODES": "2"}, "PADDLE_NNODES: is 2"),
        ({"MS_WORKER_NUM": "16"}, "MS_WORKER_NUM: is 16"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, "SLURM_NNODES: is 2"),
        ({"MA_NUM_HOSTS": "4"}, "MA_NUM_HOSTS: is 4"),
        ({"_CONDOR_NPROCS": "4"}, "_CONDOR_NPROCS: is 4"),
        ({"RANK_SIZE": "8"}, "RANK_SIZE: is 8"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NODE_RANK: is not set"),
        (
            {
                "PADDLE_TRAINER_ID": "1",
                "PADDLE_TRAINER_ENDPOINTS": "a:1,a:2,b:1,b:2",
            },
            "Paddle's variables .* started 2 tasks on this node",
        ),
    ],
)
def test_several_nodes_never_become_a_job_of_one(environ: dict[str, str], message: str) -> None:
    with pytest.raises(PdrunError, match=message) as raised:
        resolve_line("x", environ)
    assert raised.value.exit_code == 78
    assert "--" in raised.value.hint


def write_table(folder: Path, addresses: list[dict[str, str]]) -> str:
    """Write a rank table with one rank per server; return its path."""
    servers = [
        {
            "server_id": f"s{at}",
            **address,
            "device": [{"device_id": "0", "device_ip": f"10.1.0.{at}", "rank_id": str(at)}],
        }
        for at, address in enumerate(addresses)
    ]
    data = {
        "version": "1.0",
        "status": "completed",
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    path = folder / "table.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_the_size_of_a_job_is_that_of_its_rank_table(tmp_path: Path) -> None:
    path = write_table(tmp_path, [{}])
    assert resolve_line("x", {"RANK_TABLE_FILE": path, "RANK_SIZE": "1"}).spec.place.rank_table
    with pytest.raises(
        PdrunError, match=r"RANK_SIZE: is 8, but RANK_TABLE_FILE \(table.json\) has 1"
    ):
        resolve_line("x", {"RANK_TABLE_FILE": path, "RANK_SIZE": "8"})


def test_listed_hosts_are_those_of_the_rank_table(tmp_path: Path) -> None:
    """The table is not dropped: the hosts name its servers, or contradict it."""
    environ = {"RANK_TABLE_FILE": write_table(tmp_path, [{}, {}])}
    spec = resolve_line("--hosts a,b x", environ).spec
    assert spec.place.rank_table == environ["RANK_TABLE_FILE"]
    assert [(host.name, host.devices) for host in spec.place.hosts] == [("a", 1), ("b", 1)]
    with pytest.raises(PdrunError, match=r"1 host\(s\), but RANK_TABLE_FILE .* has 2 server"):
        resolve_line("--hosts a x", environ)
    assert not resolve_line("--launcher none --hosts a x", environ).spec.place.rank_table
    assert not resolve_line("--local x", environ).spec.place.rank_table


def test_two_pods_of_one_host_are_two_nodes(tmp_path: Path) -> None:
    pods = [{"host_ip": "10.0.0.9", "pod_ip": f"172.16.0.{at}"} for at in range(2)]
    environ = {"RANK_TABLE_FILE": write_table(tmp_path, pods), "XDL_IP": "172.16.0.1"}
    place = resolve_line("x", environ).spec.place
    assert [host.peer_address for host in place.hosts] == ["172.16.0.0", "172.16.0.1"]
    assert len({host.name for host in place.hosts}) == 2
    assert place.node_rank == 1


HET = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g1",
}
ARRAY = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_ARRAY_JOB_ID": "5",
    "SLURM_ARRAY_TASK_ID": "3",
}


@pytest.mark.parametrize(
    ("line", "environ", "warnings"),
    [
        ("x", HET, []),
        ("--launcher ssh x", HET, []),
        ("--nodes 1 x", ARRAY, []),
        ("x", ARRAY, []),
    ],
)
def test_an_allocation_warns_only_of_what_differs(
    line: str, environ: dict[str, str], warnings: list[str]
) -> None:
    context = run_command().make_context("run", line.split())
    words = context.params.pop("words")
    found = parse_request(context.params, words, environ).warnings
    assert [text.partition(":")[0] for text in found] == warnings
