"""The same command on every host, and rank tables, on hosts that the tests made."""

from __future__ import annotations

import json

import pytest

from tests.e2e.clusters.conftest import Cluster
from tests.launcher.ranktables.test_rules import table

pytestmark = [pytest.mark.slow, pytest.mark.root]

SHOW = """
import os
names = "RANK_ID RANK_SIZE DEVICE_ID NODE_RANK LOCAL_RANK RANK_TABLE_FILE"
print(*(os.environ.get(name, "-") for name in names.split()))
"""


def test_the_same_command_on_every_host_finds_its_place_in_the_list(cluster: Cluster) -> None:
    script = cluster.script(SHOW)
    words = ("pdrun", "--launcher", "none", "--hosts", "h2:1,h3:2", "--prefix", "none", script)
    jobs = [cluster.start(*words, at=host) for host in ("h3", "h2")]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert jobs[1].out.split() == ["0", "3", "0", "0", "0", "-"]
    ranks = sorted(line.split()[:1] + line.split()[3:5] for line in jobs[0].out.splitlines())
    assert ranks == [["1", "1", "0"], ["2", "1", "1"]]


def test_a_machine_that_is_none_of_the_hosts_is_refused(cluster: Cluster) -> None:
    code, _, err = cluster.run(
        "pdrun", "--launcher", "none", "--hosts", "h2,h3", cluster.script(SHOW), at="h1"
    )
    assert code == 2
    assert "h1 is not among the 2 host(s)" in err


def test_a_rank_table_starts_its_servers_with_its_ranks(cluster: Cluster) -> None:
    data = table(2, 2)
    for server, name in zip(data["server_list"], ("h3", "h2"), strict=True):
        server["server_id"] = name
        for device in server["device"]:
            device["device_id"] = str(int(device["device_id"]) + 4)
    path = cluster.folder / "hccl.json"
    path.write_text(json.dumps(data))
    code, out, err = cluster.run(
        "pdrun",
        "--rank-table",
        "hccl.json",
        "--backend",
        "cpu",
        "--prefix",
        "none",
        cluster.script(SHOW),
    )
    assert code == 0, err
    rows = sorted(line.split() for line in out.splitlines())
    assert [row[:5] for row in rows] == [
        ["0", "4", "4", "0", "0"],
        ["1", "4", "5", "0", "1"],
        ["2", "4", "4", "1", "0"],
        ["3", "4", "5", "1", "1"],
    ]
    assert {row[5] for row in rows} == {str(path)}
