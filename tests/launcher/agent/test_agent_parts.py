"""
Signals as events, a worker's environment, the preflight, memory kills, the event log on the
terminal.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

from pdrun.clock import FakeClock
from pdrun.endpoint import Endpoint
from pdrun.launcher.agent.announcer import ANNOUNCE_DELAY_SECONDS, Announcer
from pdrun.launcher.agent.generation import run_preflight
from pdrun.launcher.common.procfs import count_oom_kills
from pdrun.launcher.common.signals import SignalReceiver
from pdrun.launcher.jobs.run_record import make_run_name
from pdrun.launcher.launch.join import merge_spec
from pdrun.launcher.plan.environment import build_worker_env, remove_launcher_variables
from pdrun.launcher.plan.model import WorkerPlan
from pdrun.rendezvous.protocol.messages import StopWorkers, Verdict
from pdrun.worker_env import WorkerEnv
from tests.lib.agent_fakes import FakeOutput, make_assign, make_plan
from tests.lib.supervisor_driver import wait_until


def test_signals_come_as_numbers_in_order_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with SignalReceiver() as signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.read_signals() == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]
        assert signals.read_signals() == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_inherited_ignore_stays():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalReceiver() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.read_signals() == []
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_taken():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body():
        with SignalReceiver() as signals:
            seen.append((signals.read_signals(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert seen == [([], before)]


def test_a_workers_environment_reads_back_and_later_lines_win():
    plan = make_plan(2, env={"MINE": "user"})
    plan = replace(
        plan,
        base_env={"PATH": "/bin", "MINE": "base", "RANK": "stale"},
        visibility={1: {"DEV": "1"}},
    )
    env = build_worker_env(
        plan,
        "demo-run",
        make_assign(6, first=2, nodes=3, restarts=1),
        WorkerPlan(1, ("x",), None, (), 4),
    )
    found = WorkerEnv.from_env(env)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 6, 1, 2)
    assert (found.master_addr, found.master_port, found.restart_count, found.run_id) == (
        "127.0.0.1",
        4000,
        1,
        "demo",
    )
    assert (env["MINE"], env["DEV"], env["PATH"], env["OMP_NUM_THREADS"]) == (
        "user",
        "1",
        "/bin",
        "4",
    )


def test_threads_that_the_user_has_set_stay():
    plan = replace(make_plan(1), base_env={"OMP_NUM_THREADS": "7"})
    assert build_worker_env(plan, "r", make_assign(1), plan.workers[0])["OMP_NUM_THREADS"] == "7"


def test_the_device_id_on_cpus_is_the_local_rank():
    plan = make_plan(2)
    envs = [build_worker_env(plan, "r", make_assign(1), worker) for worker in plan.workers]
    assert plan.backend == "cpu" and [env["DEVICE_ID"] for env in envs] == ["0", "1"]
    npus = replace(plan, backend="npu")
    envs = [build_worker_env(npus, "r", make_assign(1), worker) for worker in plan.workers]
    assert [env["DEVICE_ID"] for env in envs] == ["0", "0"]


def test_a_job_inside_a_worker_chooses_its_own_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    plan = replace(make_plan(1), interfaces={"GLOO_SOCKET_IFNAME": "eth0"})
    env = build_worker_env(plan, "r", make_assign(1), plan.workers[0])
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "GLOO_SOCKET_IFNAME" not in remove_launcher_variables(env)[0]
    mine = {**env, "GLOO_SOCKET_IFNAME": "ib0"}
    assert remove_launcher_variables(mine)[0]["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_flight_recorder_is_set_up_with_a_hang_timeout_unless_the_user_has_done_it():
    plan = make_plan(1)
    names = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/a/collectives-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/run/a/collectives-",
    }
    worker = plan.workers[0]
    env = build_worker_env(plan, "r", make_assign(1), worker, "/run/a/agent")
    assert not names.keys() & env.keys()
    policy = replace(plan.spec.policy, hang_timeout=60.0)
    plan = replace(plan, spec=replace(plan.spec, policy=policy))
    env = build_worker_env(plan, "r", make_assign(1), worker, "/run/a/agent")
    assert {name: env.get(name) for name in names} == names
    mine = {"TORCH_FR_DUMP_TEMP_FILE": "/mine/"}
    env = build_worker_env(
        replace(plan, base_env=mine), "r", make_assign(1), worker, "/run/a/agent"
    )
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "/mine/"


def test_preflight(tmp_path):
    assert run_preflight(make_plan(), FakeOutput()).exit_code == 0
    gone = run_preflight(make_plan(cwd=str(tmp_path / "gone")), FakeOutput())
    assert (gone.exit_code, "gone" in gone.reason) == (78, True)
    missing = run_preflight(
        make_plan(argv=("python3", "x.py"), kind="script", cwd=str(tmp_path)), FakeOutput()
    )
    assert (missing.exit_code, "x.py" in missing.reason) == (2, True)
    (tmp_path / "x.py").write_text("import torch\n")
    assert run_preflight(
        make_plan(argv=("", "x.py"), kind="script", cwd=str(tmp_path)), FakeOutput()
    ).imports_torch


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "job/memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n"),
        (
            "4:memory:/job",
            "memory/job/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
        ("0::/host/path/of/a/container", "memory.events", "oom_kill 2\n"),
    ],
)
def test_memory_kills_are_counted(tmp_path, line, file, text):
    (tmp_path / "cgroup").write_text(f"1:cpu:/x\n{line}\n")
    path = tmp_path / "root" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "root") == 2
    assert count_oom_kills(tmp_path / "nothing", tmp_path / "root") == 0
    assert count_oom_kills(tmp_path / "cgroup", tmp_path / "nothing") == 0


def test_why_workers_are_stopped_is_said_only_when_it_takes_long():
    clock, output = FakeClock(), FakeOutput()
    voice = Announcer(clock, is_quiet=False, address="")
    voice.use_output(make_plan(), "run", output)
    voice.announce_stop(StopWorkers(0, 15, 30.0, "rank 1 on node0 failed: exit code 3"))
    assert voice.next_deadline() == clock.monotonic() + ANNOUNCE_DELAY_SECONDS
    voice.print_due()
    assert output.printed_lines == []
    clock.advance(ANNOUNCE_DELAY_SECONDS)
    voice.print_due()
    assert output.printed_lines == [
        "pdrun: rank 1 on node0 failed: exit code 3; stopping the other workers (grace 30 s)"
    ]
    voice.announce_stop(StopWorkers(0, 15, 30.0, "rank 2 on node0 failed: exit code 3"))
    voice.announce_verdict(Verdict(0, ""))
    assert len(output.printed_lines) == 2


def test_ranks_in_options_that_the_job_does_not_have_are_a_warning():
    clock, output = FakeClock(), FakeOutput()
    voice = Announcer(clock, is_quiet=False, address="")
    plan = make_plan(2)
    shown = replace(plan.spec.output, show_ranks="0,7", show_stderr="1,8-9")
    program = replace(plan.spec.program, stdin=5)
    voice.use_output(
        replace(plan, spec=replace(plan.spec, output=shown, program=program)), "run", output
    )
    voice.announce_start(replace(make_assign(1), world_size=2))
    assert output.printed_lines[:3] == [
        "pdrun: warning: --show-ranks 0,7: there is no rank 7; the ranks are 0-1",
        "pdrun: warning: --show-stderr 1,8-9: there is no rank 8-9; the ranks are 0-1",
        "pdrun: warning: --stdin 5: there is no rank 5; the ranks are 0-1",
    ]


def test_what_the_scheduler_process_notes_is_shown(tmp_path):
    events, clock, output = tmp_path / "events.jsonl", FakeClock(), FakeOutput()
    voice = Announcer(clock, is_quiet=False, address="", event_log=str(events))
    voice.use_output(make_plan(), "run", output)
    voice.print_due()
    events.write_text(
        '{"kind": "joined", "node": "a"}\n'
        '{"kind": "warning", "text": "another \\u001b token"}\n{"kin'
    )
    clock.advance(1)
    voice.print_due()
    assert output.printed_lines == ["pdrun: warning: another \\x1b token"]
    with events.open("a") as file:
        file.write('d": "suspect", "node": "b"}\nnot json\n[]\n')
    clock.advance(1)
    voice.print_due()
    assert output.printed_lines[1:] == ["pdrun: suspect: b"]


def test_joiners_get_the_job_and_not_the_place():
    spec = replace(make_plan(2, nodes=2, node_rank=0).spec, env={"A": "1"})
    here = Endpoint("10.0.0.1", 9)
    joined = merge_spec(
        spec.to_shared_json(), {"place.node_name": "b", "resources.devices": 4, "env.B": "2"}, here
    )
    assert (joined.place.node_rank, joined.place.node_name, joined.place.scheduler) == (
        None,
        "b",
        here,
    )
    assert (joined.resources.devices, joined.resources.nodes, joined.env) == (
        4,
        2,
        {"A": "1", "B": "2"},
    )
    assert joined.program == spec.program


def test_run_names_are_unique_and_fit_for_a_path():
    names = {
        make_run_name(make_plan(argv=("/some/where/odd name!.py",), job="")) for _ in range(20)
    }
    assert len(names) == 20
    assert all(name.startswith("odd-name-") and "/" not in name for name in names)


def test_signals_wake_a_sleeping_loop():
    with SignalReceiver() as signals:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
        assert wait_until(signals.read_signals, 5) == [signal.SIGUSR2]
