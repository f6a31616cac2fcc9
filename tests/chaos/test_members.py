"""
Who may be in: early, late, double, too few, too many, twice, gone before it began. On three or four
hosts.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable

import pytest

from pdrun.rendezvous.protocol.security import Secret, format_token
from tests.chaos.jobs import PORT, Bed
from tests.chaos.processes import BedError
from tests.e2e.conftest import until
from tests.lib.tiers import by_tier, thorough


def test_a_node_name_that_is_taken_is_refused_naming_both_hosts(bed: Bed) -> None:
    first = bed.start("h1", "--node-name", "a", nodes="2")
    first.expect("1 of 2 nodes")
    second = bed.start("h2", "--node-name", "a", nodes="2")
    assert second.wait(20) == 78, bed.said()
    assert "h1" in second.err and "'a'" in second.err, second.err
    third = bed.start("h3", nodes="2")
    bed.running(2)
    bed.order("all", "exit 0")
    assert bed.codes(first, third) == [0, 0], bed.said()
    bed.clean()


@pytest.mark.thorough
def test_a_node_rank_that_is_taken_is_refused(bed: Bed) -> None:
    first, second = bed.start("h1"), bed.start("h2", "--node-rank", "2")
    first.expect("2 of 3 nodes")
    third = bed.start("h3", "--node-rank", "2")
    assert third.wait(20) == 78, bed.said()
    assert "h2" in third.err and "rank 2" in third.err, third.err
    first.signal(signal.SIGINT)
    assert bed.codes(first, second) == [130] * 2


def test_rank_0_behind_an_address_that_is_not_its_own(bed: Bed) -> None:
    """
    As behind a service of Kubernetes, which leads the others there: it is told to add --serve, and
    then it works.
    """
    service = "10.77.0.99"
    rules = (
        "table ip nat",
        "chain ip nat out { type nat hook output priority -100 ; }",
        f"rule ip nat out ip daddr {service} dnat to 10.77.0.1",
    )
    for host, rule in itertools.product(("h1", "h2"), rules):
        try:
            bed[host].run("nft", "add", *rule.split())
        except BedError as error:
            pytest.skip(f"this kernel has no NAT: {error}")
    address = f"{service}:{PORT}"
    lost = bed.start("h1", "--node-rank", "0", "--start-timeout", "4", scheduler=address, nodes="2")
    assert lost.wait(30) == 69, bed.said()
    hint = (
        f"this node is rank 0, but {service} is not one of its addresses; add --serve if that is a"
        " service or NAT in front of it"
    )
    assert hint in lost.err and lost.err.rstrip().endswith(hint), lost.err
    jobs = [
        bed.start("h1", "--node-rank", "0", "--serve", scheduler=address, nodes="2"),
        bed.start("h2", "--node-rank", "1", scheduler=address, nodes="2"),
    ]
    bed.running(2)
    bed.order("all", "exit 0")
    assert bed.codes(*jobs) == [0, 0], bed.said()


def test_two_hosts_that_both_claim_rank_0_hear_of_each_other(bed: Bed) -> None:
    """The one that is not the scheduler's opens none of its own: it joins, and is refused."""
    first = bed.start("h1", "--node-rank", "0")
    first.expect("1 of 3 nodes")
    second = bed.start("h2", "--node-rank", "0")
    assert second.wait(20) == 78, bed.said()
    assert "h1" in second.err and "rank 0" in second.err, second.err
    first.signal(signal.SIGINT)
    assert bed.codes(first) == [130], bed.said()
    bed.clean()


def test_a_node_too_many_and_one_too_late_are_refused(make_bed: Callable[[int], Bed]) -> None:
    bed = make_bed(4)
    jobs = bed.job()
    bed.running()
    extra = bed.start("h4")
    assert extra.wait(20) == 69 and "3 node" in extra.err, extra.err
    bed.order("all", "exit 0")
    assert bed.codes(*jobs) == [0] * 3
    late = bed.start("h4", "--start-timeout", "2", "--no-serve")
    assert late.wait(20) == 69 and "h1:7777" in late.err, late.err


def test_too_few_nodes_are_69_and_say_who_is_missing(bed: Bed) -> None:
    jobs = [
        bed.start(name, "--start-timeout", "3", "--node-rank", str(rank))
        for name, rank in (("h1", 0), ("h3", 2))
    ]
    assert bed.codes(timeout=20) == [69, 69], bed.said()
    assert all("node rank 1" in job.err for job in jobs), bed.said()
    bed.clean()


@pytest.mark.thorough  # e2e/test_meeting.py has it: `two_unrelated_jobs`
def test_two_jobs_at_one_port_do_not_mix(bed: Bed) -> None:
    """The second job's node is told whose port that is; both jobs' own nodes go on."""
    first = bed.start("h1", "--job", "mine", nodes="2")
    first.expect("1 of 2 nodes")
    other = bed.start("h2", "--job", "yours", nodes="2")
    assert other.wait(20) == 69 and "mine" in other.err and "yours" in other.err, other.err
    same = bed.start("h3", "--job", "mine", nodes="2")
    bed.running(2)
    bed.order("all", "exit 0")
    assert bed.codes(first, same) == [0, 0], bed.said()


@pytest.mark.thorough  # e2e/test_meeting.py has it: `wrong_token`
def test_another_token_is_told_on_both_sides_within_five_seconds(bed: Bed) -> None:
    first = bed.start("h1", nodes="2")
    first.expect("1 of 2 nodes")
    wrong = bed.folder / "wrong"
    wrong.touch(0o600)
    wrong.write_text(format_token(Secret.random()) + "\n")
    started = time.monotonic()
    second = bed.start("h2", nodes="2", token=wrong)
    assert second.wait(20) == 77 and "token" in second.err, second.err
    assert time.monotonic() - started < 12, "five seconds on a quiet machine"
    first.expect("token", timeout=5)
    third = bed.start("h3", nodes="2")
    bed.running(2)
    bed.order("all", "exit 0")
    assert bed.codes(first, third) == [0, 0], bed.said()


@pytest.mark.slow
def test_an_agent_that_is_started_again_and_again_is_one_member(bed: Bed) -> None:
    """
    Killed as soon as it is in, started again at once under the same name: no ghost holds its place
    or its name.
    """
    first = bed.start("h1")
    first.expect("1 of 3 nodes")
    for times in range(by_tier(3, 20)):
        again = bed.start("h3")
        until(lambda: _joins(bed, "h3") > times, f"in for the {times + 1}th time", 30)  # noqa: B023
        again.signal(signal.SIGKILL)
        assert again.wait(10) == -signal.SIGKILL, bed.said()
    second, third = bed.start("h2"), bed.start("h3")
    bed.running()
    bed.order("all", "exit 0")
    assert bed.codes(first, second, third) == [0] * 3, bed.said()
    assert len(bed.events("assigned")) == 1
    bed.clean()


@pytest.mark.parametrize("moment", [thorough(0.0), 0.03, thorough(0.15)])
def test_a_node_that_dies_while_the_generation_forms_ends_the_job_everywhere(
    bed: Bed, moment: float
) -> None:
    """
    The third node makes the job whole and is killed around its assignment: the others either go on
    gathering, or end with 69; they never hang, and never start without it.
    """
    first, second = (
        bed.start("h1", "--start-timeout", "10"),
        bed.start("h2", "--start-timeout", "10"),
    )
    first.expect("2 of 3 nodes")
    third = bed.start("h3", "--start-timeout", "10")
    until(lambda: _joins(bed, "h3") > 0, "the third is in", 30)
    time.sleep(moment)  # the moment is what is tested
    third.signal(signal.SIGKILL)
    assert bed.codes(first, second, timeout=40) == [69, 69], bed.said()
    bed.clean()


def _joins(bed: Bed, node: str) -> int:
    return sum(event.data["node"] == node for event in bed.events("joined"))
