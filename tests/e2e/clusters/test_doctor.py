"""``pdrun doctor`` between hosts: healthy ones, and ones with planted troubles."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.e2e.clusters.conftest import Cluster
from tests.e2e.clusters.test_network import PORTS
from tests.lib.netns_hosts import run

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.xdist_group("hosts"),
]


def diagnose(cluster: Cluster, *words: str) -> tuple[int, list[dict[str, Any]]]:
    code, out, err = cluster.run("pdrun", "doctor", "--hosts", "h1,h2", "--json", *words)
    assert out, err
    return code, json.loads(out)["findings"]


def serious(found: list[dict[str, Any]], *checks: str) -> list[dict[str, Any]]:
    return [one for one in found if one["level"] != "ok" and one["check"] in checks]


def test_two_hosts_that_differ_in_a_file(cluster: Cluster) -> None:
    # /run is each host's own
    for name in ("h1", "h2"):
        run(*cluster.hosts.enter(name), "sh", "-c", f"echo {name} > /run/conf.yaml")
    code, found = diagnose(cluster, "--files", "/run/conf.yaml,/etc/hostname")
    checks = {one["check"]: one for one in found}
    assert checks["ports"]["level"] == "ok" and "MB/s" in checks["allreduce"]["what"], found
    assert {"h1", "h2"} <= {one["node"] for one in found}
    differs = serious(found, "differs")
    assert any("/run/conf.yaml differs" in one["what"] for one in differs), found
    assert code == 78


@pytest.mark.thorough
def test_a_firewall_between_hosts_is_named(cluster: Cluster) -> None:
    with cluster.firewall(PORTS):
        code, found = diagnose(cluster, "--port-range", PORTS)
    assert code == 78
    (problem,) = serious(found, "ports")
    assert "no connection to" in problem["what"] and "open the ports" in problem["hint"]
    assert "h1" in problem["where"] and "h2" in problem["where"]


@pytest.mark.thorough
def test_a_firewall_that_passes_ssh_only_is_a_finding(cluster: Cluster) -> None:
    with cluster.firewall():
        code, found = diagnose(cluster, "--start-timeout", "15s")
    (problem,) = found
    assert code == 78 and problem["check"] == "job" and os.linesep not in problem["what"]
