"""CPUs are dealt whole core by whole core, never twice, and every limit is obeyed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.backends.affinity import (
    bind_listed,
    check_disjoint,
    parse_cpu_list,
    read_cpus,
    share_cpus,
    split_cpus,
)
from pdrun.errors import PdrunError, UsageError
from pdrun.topology import CpuSet
from tests.backends.helpers import tree


def test_listed_cpus_are_those_of_the_local_ranks() -> None:
    binding = bind_listed(machine(8), [(0, 1, 2), (7,)])
    assert binding.sets == ((0, 1, 2), (7,)) and binding.threads == (3, 1)
    assert binding.note == "bound: the lists of --bind"
    assert bind_listed(machine(8, quota=2.0), [(0, 1, 2), (7,)]).threads == (1, 1)


def machine(cores: int, threads: int = 1, nodes: int = 1, quota: float | None = None) -> CpuSet:
    """
    A machine numbered as Linux does it: first the first thread of every core, then the second.
    """
    groups = tuple(
        tuple(core + thread * cores for thread in range(threads)) for core in range(cores)
    )
    each = cores // nodes
    parts = [groups[node * each : (node + 1) * each] for node in range(nodes)]
    numa = tuple(tuple(sorted(cpu for core in part for cpu in core)) for part in parts)
    return CpuSet(tuple(range(cores * threads)), quota, groups, numa)


def test_three_cpus_for_two_workers_are_two_and_one() -> None:
    binding = split_cpus(machine(3), 2)
    assert binding.sets == ((0, 1), (2,))
    assert binding.threads == (2, 1)


def test_hyper_threads_stay_together() -> None:
    assert split_cpus(machine(4, threads=2), 2).sets == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_two_workers_on_two_memory_nodes_never_share_one() -> None:
    binding = split_cpus(machine(8, threads=2, nodes=2), 2, "numa")
    assert binding.sets == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


def test_numa_spreads_workers_by_what_a_node_has() -> None:
    lopsided = CpuSet((0, 1, 4, 5, 6, 7), None, (), ((0, 1), (4, 5, 6, 7)))
    assert split_cpus(lopsided, 3, "numa").sets == ((0, 1), (4, 5), (6, 7))
    assert split_cpus(machine(8, nodes=4), 2, "numa").sets == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_cores_are_dealt_along_memory_nodes() -> None:
    """Numbers may alternate between memory nodes; neighbours in memory still go to one worker."""
    alternating = CpuSet((0, 1, 2, 3), None, ((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)))
    assert split_cpus(alternating, 2, "cores").sets == ((0, 2), (1, 3))


def test_more_workers_than_cores_are_left_unbound_with_the_reason() -> None:
    binding = split_cpus(machine(2, threads=2), 3, "cores")
    assert binding.sets == ((), (), ())
    assert binding.threads == (2, 1, 1)
    assert "2 cores for 3 workers" in binding.note


def test_one_worker_is_left_with_the_whole_mask() -> None:
    assert split_cpus(machine(4), 1).sets == ((),)
    assert split_cpus(machine(4), 1).threads == (4,)
    assert split_cpus(machine(4), 1, "cores").sets == ((0, 1, 2, 3),)


def test_an_empty_mask_is_never_bound() -> None:
    for mode in ("auto", "cores", "numa", "none"):
        binding = split_cpus(CpuSet(()), 2, mode)  # type: ignore[arg-type]
        assert (binding.sets, binding.threads) == (((), ()), (1, 1))


def test_threads_obey_the_bandwidth_limit_while_the_set_is_wide() -> None:
    binding = split_cpus(machine(16, quota=3.5), 2)
    assert [len(own) for own in binding.sets] == [8, 8]
    assert binding.threads == (2, 1)
    assert split_cpus(machine(16, quota=0.5), 2).threads == (1, 1)
    assert split_cpus(machine(16, quota=3), 4, "none").threads == (1, 1, 1, 1)


def test_a_sys_that_lies_is_ignored() -> None:
    twice = CpuSet((0, 1, 2, 3), None, ((0, 1), (1, 2), (3,)), ((0, 1, 2), (2, 3)))
    assert split_cpus(twice, 2).sets == ((0, 1), (2, 3))
    assert "NUMA nodes are unknown" in split_cpus(twice, 2, "numa").note


@pytest.mark.parametrize("bad", [(0, "cores"), (-1, "auto"), (2, "socket")])
def test_nonsense_is_refused(bad: tuple[int, str]) -> None:
    with pytest.raises(UsageError):
        split_cpus(machine(4), *bad)  # type: ignore[arg-type]


def test_the_check_finds_what_it_is_there_for() -> None:
    with pytest.raises(PdrunError, match="CPU 1 would be given to local ranks 0 and 1"):
        check_disjoint([(0, 1), (1, 2)])
    with pytest.raises(PdrunError, match="bound to no CPU"):
        check_disjoint([(0,), ()])


def test_simulated_nodes_share_a_machine() -> None:
    whole = machine(4, threads=2, quota=6.0)
    parts = [share_cpus(whole, index, 2) for index in range(2)]
    assert [part.cpus for part in parts] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [part.quota for part in parts] == [3.0, 3.0]
    assert parts[1].cores == ((2, 6), (3, 7))
    small = share_cpus(machine(2), 3, 4)
    assert (small.cpus, small.quota, small.usable_cpus) == ((0, 1), 0.5, 1)
    with pytest.raises(UsageError):
        share_cpus(whole, 2, 2)


MACHINES = st.builds(
    machine,
    st.integers(1, 24),
    st.integers(1, 3),
    st.just(1),
    st.none() | st.floats(0.1, 80, allow_nan=False),
) | st.builds(
    machine, st.sampled_from((8, 12, 24)), st.integers(1, 2), st.sampled_from((2, 4)), st.none()
)
MODES = st.sampled_from(("auto", "cores", "numa", "none"))


@given(MACHINES, st.integers(1, 40), MODES, st.randoms())
def test_any_split_is_disjoint_whole_and_within_the_limits(
    cpus: CpuSet, workers: int, mode: str, dice
) -> None:  # type: ignore[no-untyped-def]
    mask = tuple(sorted(dice.sample(cpus.cpus, dice.randint(0, len(cpus.cpus)))))
    part = CpuSet(mask, cpus.quota, cpus.cores, cpus.numa)
    binding = split_cpus(part, workers, mode)  # type: ignore[arg-type]
    assert len(binding.sets) == len(binding.threads) == workers
    assert min(binding.threads) >= 1
    assert sum(binding.threads) <= max(workers, part.usable_cpus)
    if binding.is_bound:
        check_disjoint(binding.sets)
        flat = {cpu for own in binding.sets for cpu in own}
        assert flat <= set(mask)
        assert flat == set(mask) or mode == "numa"
        for core in cpus.cores:  # no core is shared by two workers
            assert sum(bool(set(core) & set(own)) for own in binding.sets) <= 1
        assert all(
            threads <= len(own) for threads, own in zip(binding.threads, binding.sets, strict=True)
        )


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares_differ_by_one_core_at_most(cores: int, workers: int) -> None:
    sizes = [len(own) for own in split_cpus(machine(cores), workers, "cores").sets]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 32), st.integers(1, 8))
def test_simulated_nodes_never_overlap_when_there_is_a_core_each(cores: int, nodes: int) -> None:
    parts = [share_cpus(machine(cores), index, nodes) for index in range(nodes)]
    if cores >= nodes:
        check_disjoint([part.cpus for part in parts])
        assert sum(len(part.cpus) for part in parts) == cores
    assert all(part.usable_cpus >= 1 for part in parts)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)),
        ("7", (7,)),
        ("", ()),
        ("x", ()),
        ("3-1", ()),
        ("0,,1", (0, 1)),
    ],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


TOPOLOGY = {
    "sys/devices/system/cpu/cpu0/topology/core_cpus_list": "0,2\n",
    "sys/devices/system/cpu/cpu1/topology/core_cpus_list": "1,3\n",
    "sys/devices/system/cpu/cpu2/topology/core_cpus_list": "0,2\n",
    "sys/devices/system/cpu/cpu3/topology/core_cpus_list": "1,3\n",
    "sys/devices/system/node/node0/cpulist": "0,2\n",
    "sys/devices/system/node/node1/cpulist": "1,3\n",
    "sys/devices/system/node/has_cpu": "0-1\n",
}
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_topology_is_cut_to_the_mask(tmp_path: Path) -> None:
    cpus = read_cpus(tree(tmp_path, TOPOLOGY), mask=(0, 1, 2))
    assert cpus == CpuSet((0, 1, 2), None, ((0, 2), (1,)), ((0, 2), (1,)))


def test_older_kernels_and_no_sys_at_all(tmp_path: Path) -> None:
    old = {
        name.replace("core_cpus_list", "thread_siblings_list"): text
        for name, text in TOPOLOGY.items()
    }
    assert read_cpus(tree(tmp_path / "a", old), mask=range(4)).cores == ((0, 2), (1, 3))
    assert read_cpus(tmp_path / "b", mask=(3, 1)) == CpuSet((1, 3))


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/user.slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000\n",
        },
    )
    assert read_cpus(root, mask=range(8)).quota == 1.5
    (root / "sys/fs/cgroup/user.slice/job.scope/cpu.max").write_text("50000 100000")
    assert read_cpus(root, mask=range(8)).quota == 0.5


def test_version_1_and_hybrid_cgroups(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/job\n0::/elsewhere\n",
            "proc/self/mountinfo": "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    assert read_cpus(root, mask=range(8)).quota == 2.0


@pytest.mark.parametrize("path", ["/docker/abc", "/../../docker/abc", "/kubepods/pod1/abc"])
def test_a_container_finds_its_limit_at_the_mount(tmp_path: Path, path: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": V2.replace(" / ", " /docker/abc ", 1),
            "sys/fs/cgroup/cpu.max": "300000 100000\n",
        },
    )
    assert read_cpus(root, mask=range(8)).quota == 3.0


@pytest.mark.parametrize("text", ["", "max", "0 100000", "100000 0", "abc def", "1 2 3"])
def test_nonsense_limits_are_none(tmp_path: Path, text: str) -> None:
    root = tree(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": text},
    )
    assert read_cpus(root, mask=range(2)).quota is None


def test_this_machine() -> None:
    cpus = read_cpus()
    assert set(cpus.cpus) == os.sched_getaffinity(0)
    assert 1 <= cpus.usable_cpus <= len(cpus.cpus)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_real_limit_is_read_back() -> None:
    """A process put into a cgroup with a limit of half a CPU reads exactly that."""
    mounts = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup cgroup " in line and "cpu" in line.rsplit(" ", 1)[1].split(",")
    ]
    if not mounts:
        pytest.skip("no cgroup v1 cpu controller")
    place = Path(mounts[0]) / "pdrun-test-quota"
    try:
        place.mkdir()
        (place / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no cgroup with a limit can be made: {error}")
    try:
        child = os.fork()
        if child == 0:
            (place / "cgroup.procs").write_text(str(os.getpid()))
            os._exit(10 if read_cpus().quota == 0.5 else 11)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    finally:
        place.rmdir()
