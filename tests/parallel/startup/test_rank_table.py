"""`pdrun.init()` in a process that is one rank of an Ascend rank table."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pdrun.errors import ConfigError
from pdrun.launcher.ranktables.files import wait_for_table
from pdrun.parallel.startup.rank_table import describe_rank, join_by_table
from tests.lib.tiers import thorough
from tests.lib.worker_processes import finish_all, fork, free_port, reports

pytestmark = pytest.mark.torch

SUM = """
ctx = pdrun.init()
import torch, torch.distributed as dist
value = torch.tensor([float(ctx.rank + 1)])
dist.all_reduce(value)
report(ctx, sum=value.item())
"""


def write_table(folder: Path, servers: dict[str, list[int]]) -> str:
    """
    Write a table of servers and their ranks; return its path.

    Device addresses are random: the port of the ranks follows from the table's content.
    """
    dice = random.SystemRandom()
    table = {
        "status": "completed",
        "version": "1.0",
        "server_count": str(len(servers)),
        "server_list": [
            {
                "server_id": name,
                "device": [
                    {
                        "device_id": str(index),
                        "device_ip": f"10.{number}.{dice.randrange(256)}.{index + 1}",
                        "rank_id": str(rank),
                    }
                    for index, rank in enumerate(ranks)
                ],
            }
            for number, (name, ranks) in enumerate(servers.items())
        ],
    }
    path = folder / "hccl.json"
    path.write_text(json.dumps(table))
    return str(path)


def start_ranks(folder: Path, environ: dict[str, str], world: int) -> list[Any]:
    return [
        fork(folder, SUM, {**environ, "RANK_ID": str(rank), "RANK_SIZE": str(world)})
        for rank in range(world)
    ]


@pytest.mark.parametrize("name", [thorough("RANK_TABLE_FILE"), "MINDSPORE_HCCL_CONFIG_PATH"])
def test_processes_of_a_table_form_one_world(tmp_path: Path, name: str) -> None:
    table = write_table(tmp_path, {"127.0.0.1": [1, 0]})
    ended = finish_all(start_ranks(tmp_path, {name: table}, 2))
    assert [code for code, _, _ in ended] == [0, 0], ended
    found = reports("".join(out for _, out, _ in ended))
    assert {(one["rank"], one["local_rank"], one["sum"]) for one in found} == {
        (0, 0, 3.0),
        (1, 1, 3.0),
    }
    assert {(one["world_size"], one["nodes"]) for one in found} == {(2, 1)}


def test_the_named_scheduler_wins(tmp_path: Path) -> None:
    """Both servers are this host, but neither address of the table can be reached."""
    port = free_port()
    environ = {
        "RANK_TABLE_FILE": write_table(tmp_path, {"192.0.2.1": [0], "192.0.2.2": [1]}),
        "PDRUN_SCHEDULER": f"127.0.0.1:{port}",
    }
    ended = finish_all(start_ranks(tmp_path, environ, 2))
    assert [code for code, _, _ in ended] == [0, 0], ended
    found = reports("".join(out for _, out, _ in ended))
    assert {(one["rank"], one["node_rank"], one["nodes"]) for one in found} == {
        (0, 0, 2),
        (1, 1, 2),
    }


@pytest.mark.parametrize(
    ("environ", "where", "what"),
    [
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, "RANK_TABLE_FILE", "is not set"),
        ({"RANK_TABLE_FILE": "TABLE", "RANK_SIZE": "2"}, "RANK_ID", "is not set"),
        ({"RANK_TABLE_FILE": "TABLE", "RANK_ID": "0", "RANK_SIZE": "8"}, "RANK_SIZE", "has 2"),
        ({"RANK_TABLE_FILE": "TABLE", "RANK_ID": "2"}, "RANK_ID", "ranks 0 to 1"),
        ({"RANK_TABLE_FILE": "TABLE", "RANK_ID": "one"}, "RANK_ID", "not a whole number"),
    ],
)
def test_what_contradicts_the_table_is_refused_by_name(
    tmp_path: Path, environ: dict[str, str], where: str, what: str
) -> None:
    table = write_table(tmp_path, {"127.0.0.1": [0, 1]})
    environ = {name: table if value == "TABLE" else value for name, value in environ.items()}
    with pytest.raises(ConfigError) as caught:
        join_by_table(environ, lambda: None)
    assert caught.value.where == where
    assert what in caught.value.what


@pytest.mark.parametrize(
    "environ", [{}, {"RANK_ID": "0", "RANK_SIZE": "1"}, {"RANK_ID": "0"}, {"RANK_SIZE": "1"}]
)
def test_a_single_process_stays_alone(environ: dict[str, str]) -> None:
    assert join_by_table(environ, lambda: None) == (None, None)


def test_ranks_are_counted_by_server(tmp_path: Path) -> None:
    path = write_table(tmp_path, {"10.0.0.2": [2, 3], "10.0.0.1": [0, 1]})
    table = wait_for_table(path)
    last = describe_rank(table, 3, None, "RANK_TABLE_FILE")
    assert (last.rank, last.world, last.local_rank, last.local_size) == (3, 4, 1, 2)
    assert (last.node_rank, last.nodes) == (1, 2)
    assert [host.name for host in last.hosts] == ["10.0.0.1"]
    assert last.job_name == describe_rank(table, 0, 4, "RANK_TABLE_FILE").job_name
