"""What workers use: real processes and /proc, nvidia-smi by its answers."""

from __future__ import annotations

import os
import time

from pdrun.backends.base import ToolAnswer
from pdrun.launcher.diagnosis.usage import (
    FIRST_SECONDS,
    SAMPLE_SECONDS,
    UsageSampler,
    match_devices,
)
from pdrun.topology import Device

ANSWER = """\
0, GPU-11aa, 87, 30720, 81920
1, GPU-22bb, [N/A], 100, 81920
not a row
"""


def test_a_sample_has_the_share_of_a_cpu_and_the_memory_of_each_worker():
    pid = os.getpid()
    block = bytes(64 << 20)  # resident, as it is cleared
    block = bytearray(block)
    sampler = UsageSampler(100.0, 4, dict)
    assert sampler.next_at == 100.0 + FIRST_SECONDS
    sampler.begin([(4, 0, pid)], 100.0)
    begin = time.process_time()
    while time.process_time() - begin < 0.2:
        pass
    found = {one.name: one for one in sampler.take([(4, 0, pid)], 101.0)}
    assert sampler.next_at == 101.0 + SAMPLE_SECONDS
    # 0.2 s of CPU in one second by this clock
    assert 15 <= found["cpu_percent"].sum <= 60 and found["cpu_percent"].rank == 4
    assert found["memory_bytes"].sum > len(block)
    assert 0 < found["host_cpu_percent"].sum <= 100
    assert 0 < found["host_memory_percent"].sum < 100


def test_a_worker_that_has_ended_is_left_out():
    sampler = UsageSampler(0.0, 0, dict)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    sampler.begin([(0, 0, child)], 0.0)
    assert {one.name for one in sampler.take([(0, 0, child)], 5.0)} <= {
        "host_cpu_percent",
        "host_memory_percent",
    }


def test_values_of_devices_belong_to_their_ranks():
    devices = {
        6: Device("cuda", 0, "0"),
        7: Device("cuda", 1, "GPU-22bb"),
        8: Device("cuda", 0, "MIG-33cc"),
        9: Device("cpu", 0),
    }
    found = match_devices(ANSWER, devices)
    assert found == {
        6: {
            "device_percent": 87.0,
            "device_memory_bytes": 30720.0 * (1 << 20),
            "device_memory_percent": 37.5,
        },
        7: {
            "device_memory_bytes": 100.0 * (1 << 20),
            "device_memory_percent": 100 * 100 / 81920,
        },
    }


def test_a_tool_that_fails_is_not_called_again():
    calls = []

    def run_tool(command):
        calls.append(command)
        return ToolAnswer("hung")

    sampler = UsageSampler(0.0, 0, dict, run_tool)
    sampler.begin([], 0.0)
    assert sampler._query is not None
    sampler._query.result()
    for turn in range(1, 5):
        sampler.take([], 60.0 * turn)
    assert len(calls) == 1


def test_the_answer_of_the_tool_is_in_the_next_sample():
    sampler = UsageSampler(
        0.0, 0, lambda: {0: Device("cuda", 0, "0")}, lambda command: ToolAnswer("ok", ANSWER)
    )
    sampler.begin([], 0.0)
    sampler._query.result()
    found = {one.name: one for one in sampler.take([(0, 0, os.getpid())], 15.0)}
    assert found["device_percent"].sum == 87.0 and found["device_percent"].rank == 0


def test_a_large_job_samples_less_often_and_not_all_at_once():
    samplers = [UsageSampler(0.0, 8 * node, dict, slowness=5.0) for node in range(200)]
    starts = {sampler.next_at for sampler in samplers}
    assert min(starts) == FIRST_SECONDS and max(starts) <= 5 * FIRST_SECONDS and len(starts) > 50
    samplers[0].take([], 100.0)
    assert samplers[0].next_at == 100.0 + 5 * SAMPLE_SECONDS
