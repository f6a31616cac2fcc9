"""Names and addresses: late, changed, misleading, IPv6 alone."""

from __future__ import annotations

from tests.chaos.jobs import PORT, Bed

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
