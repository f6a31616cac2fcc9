"""Names and addresses: late, changed, misleading, IPv6 alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.chaos.jobs import PORT, Bed
from tests.lib.tiers import thorough

ALL = {"10.77.0.1": "h1", "10.77.0.2": "h2", "10.77.0.3": "h3"}


def ends_well(bed: Bed) -> None:
    bed.running(timeout=60)
    bed.order("all", "exit 0")
    assert bed.codes() == [0] * 3, bed.said()
    bed.clean()


def test_a_name_that_comes_late_is_waited_for(bed: Bed) -> None:
    """As in Kubernetes, where a service has its name once its pod is ready."""
    bed["h3"].write_hosts({"10.77.0.3": "h3"})
    jobs = bed.job("--no-serve", hosts=["h3"])
    jobs[0].expect("the name 'h1' is not known here")
    bed.job(hosts=["h1", "h2"])
    bed["h3"].write_hosts(ALL)
    ends_well(bed)


def test_a_name_that_moves_to_another_address_is_followed(bed: Bed) -> None:
    bed["h3"].write_hosts({"10.77.0.3": "h3", "10.77.0.99": "h1"})
    jobs = bed.job("--no-serve", hosts=["h3"])
    jobs[0].expect("waiting for the scheduler at h1:7777")
    bed.job(hosts=["h1", "h2"])
    bed["h3"].write_hosts(ALL)
    ends_well(bed)


def test_a_host_whose_own_name_is_loopback_is_reached_all_the_same(bed: Bed) -> None:
    """
    Debian writes the host's own name beside 127.0.1.1: the store must not be told to others as
    that.
    """
    for name in ("h1", "h2", "h3"):
        bed[name].write_hosts(
            {"127.0.1.1": name, **{at: who for at, who in ALL.items() if who != name}}
        )
    bed.job(scheduler=f"10.77.0.1:{PORT}")
    bed.running()
    assert bed.event("assigned").data["master"].startswith("10.77.0."), bed.event("assigned")
    ends_well(bed)


def test_a_scheduler_named_by_a_name_that_is_loopback_at_home(bed: Bed) -> None:
    """
    h1 resolves its own name to 127.0.1.1, where nobody else could come: it listens on the address
    by which the others know it.
    """
    bed["h1"].write_hosts({"127.0.1.1": "h1", "10.77.0.2": "h2", "10.77.0.3": "h3"})
    bed.job()
    ends_well(bed)


def test_ipv6_alone(bed: Bed) -> None:
    for host in bed.cluster:
        host.in_net("ip", "addr", "flush", "dev", "eth0", "scope", "global", "permanent")
        host.in_net("ip", "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
        host.write_hosts({peer.address6: peer.name for peer in bed.cluster})
    bed.job()
    bed.running(timeout=60)
    assert bed.event("assigned").data["master"].startswith("[fd77::1]"), bed.event("assigned")
    ends_well(bed)


REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), "on", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
dist.destroy_process_group()
"""
REDUCE_BY_INIT = """
import os, pdrun, torch, torch.distributed as dist
pdrun.init()
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), "on", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""


def own_names(bed: Bed, kind: str) -> None:
    """Make the hosts' own names useless to gloo, which looks for its address there."""
    for host in bed.cluster:
        others = {at: name for at, name in ALL.items() if name != host.name}
        host.write_hosts({**others, "127.0.1.1": host.name} if kind == "loopback" else {})


@pytest.mark.parametrize("kind", ["loopback", thorough("unresolved")])
def test_gloo_reduces_although_the_own_name_is_useless(bed: Bed, tmp_path: Path, kind: str) -> None:
    """Debian and Ubuntu map the own name to 127.0.1.1, where gloo would wait for its peers."""
    own_names(bed, kind)
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    jobs = bed.job(
        hosts=["h1", "h2"], nodes="2", scheduler=f"10.77.0.1:{PORT}", program=[str(script)]
    )
    assert bed.codes(timeout=120) == [0, 0], bed.said()
    for job in jobs:
        assert "sum 2.0 on eth0" in job.out
        assert "resolve hostname" not in job.err


@pytest.mark.thorough
def test_gloo_reduces_in_a_dynamic_cluster(bed: Bed, tmp_path: Path) -> None:
    own_names(bed, "loopback")
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE_BY_INIT)
    common = {
        "PDRUN_SCHEDULER": f"10.77.0.1:{PORT}",
        "PDRUN_WORKERS": "2",
        "PDRUN_TOKEN_FILE": str(bed.folder / "token"),
    }
    roles = (("h1", "scheduler"), ("h1", "worker"), ("h2", "worker"))
    jobs = [
        bed.launch(host, sys.executable, str(script), env={**common, "PDRUN_ROLE": role})
        for host, role in roles
    ]
    assert bed.codes(timeout=120) == [0] * 3, bed.said()
    assert ["sum 2.0 on eth0" in job.out for job in jobs] == [False, True, True], bed.said()
