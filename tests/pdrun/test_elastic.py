"""
`pdrun.elastic` and `pdrun.progress` as a script has them: in processes of their own, with a socket
that listens.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdrun import elastic
from pdrun.launcher.agent.channel import MAX_DATAGRAM_BYTES

PRELUDE = """
import os, signal, sys, threading, time
import pdrun
from pdrun import elastic
def up(): print("up", flush=True)
"""


@dataclass
class Agent:
    """The other end of a script."""

    folder: Path
    socket: socket.socket
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, code: str, **env: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "RANK": "3",
            "WORLD_SIZE": "4",
            "PDRUN_GENERATION": "2",
            "PDRUN_AGREED_STEP": "41",
            "TORCHELASTIC_RESTART_COUNT": "1",
            "PDRUN_AGENT": str(self.folder / "agent"),
            **env,
        }
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-c", PRELUDE + code],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def run(self, code: str, **env: str) -> tuple[int, str, str]:
        process = self.start(code, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def heard(self) -> list[dict[str, Any]]:
        """Everything that was said so far."""
        found = []
        while True:
            try:
                found.append(json.loads(self.socket.recv(MAX_DATAGRAM_BYTES)))
            except BlockingIOError:
                return found


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("a")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listening:
        listening.bind(str(folder / "agent"))
        made = Agent(folder, listening)
        yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n", process.stderr.read() if process.stderr else ""


def test_outside_pdrun_everything_does_nothing() -> None:
    code = (
        PRELUDE + "pdrun.progress(3, busy=0.5); elastic.saved(3)\nprint(elastic.agreed_step(),"
        " elastic.generation(), elastic.restart_count(),"
        " elastic.stopping())\nprint(threading.active_count(), os.listdir('/proc/self/fd'))"
    )
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PDRUN_", "RANK", "TORCHEL"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("-1 0 0 False\n1 "), done.stderr
    assert done.stderr == ""


def test_what_the_environment_tells(agent: Agent) -> None:
    code, out, err = agent.run(
        "print(elastic.agreed_step(), elastic.generation(), elastic.restart_count())"
    )
    assert (code, out) == (0, "41 2 1\n"), err


def test_a_report_has_rank_generation_and_step(agent: Agent) -> None:
    assert agent.run("pdrun.progress(7, busy=0.25); elastic.saved(6)")[0] == 0
    assert agent.heard() == [
        {"rank": 3, "generation": 2, "step": 7, "busy": 0.25},
        {"rank": 3, "generation": 2, "step": 7, "busy": 0.25, "saved": 6},
    ]


def test_quick_steps_are_told_ten_times_a_second_and_the_last_one_always(agent: Agent) -> None:
    code = (
        "for step in range(200_000):"
        " pdrun.progress(step)\nprint(threading.active_count())\ntime.sleep(1)"
    )
    begin = time.monotonic()
    _, out, _ = agent.run(code)
    took, heard = time.monotonic() - begin, agent.heard()
    assert (
        heard[-1]["step"] == 199_999 or len(heard) == 11
    )  # the queue of a socket that nobody reads holds so many
    assert len(heard) <= 2 + took * 10
    assert out == "2\n"


def test_the_last_of_quick_steps_is_told_though_the_process_exits(agent: Agent) -> None:
    status, _, err = agent.run("for step in range(50): pdrun.progress(step)")
    assert status == 0, err
    assert [one["step"] for one in agent.heard()] == [0, 49]


def test_slow_steps_need_no_thread(agent: Agent) -> None:
    code = (
        "for step in range(3):\n pdrun.progress(step)\n"
        " time.sleep(0.15)\nprint(threading.active_count())"
    )
    _, out, _ = agent.run(code)
    assert [said["step"] for said in agent.heard()] == [0, 1, 2]
    assert out == "1\n"


def test_an_agent_that_does_not_read_costs_nothing(agent: Agent) -> None:
    code = (
        "for step in range(30): pdrun.progress(step); time.sleep(0.11)\n"
        "begin = time.monotonic(); elastic.saved(5); print(time.monotonic() - begin < 10)"
    )
    assert agent.run(code)[:2] == (0, "True\n")


def test_an_agent_that_is_gone_is_no_error(agent: Agent) -> None:
    agent.socket.close()
    (agent.folder / "agent").unlink()
    assert agent.run("pdrun.progress(1); elastic.saved(1); print('on')")[:2] == (0, "on\n")


@pytest.mark.parametrize(
    "call",
    [
        "pdrun.progress(-1)",
        "pdrun.progress(2**53)",
        "pdrun.progress(1, busy=-1)",
        "pdrun.progress(1, busy=float('nan'))",
        "elastic.saved(-1)",
    ],
)
def test_what_is_no_step_is_an_error(agent: Agent, call: str) -> None:
    code, _, err = agent.run(call)
    assert code == 1 and "ValueError" in err
    assert agent.heard() == []


def test_numbers_of_a_step(agent: Agent) -> None:
    code = (
        "class Tensor:\n def __float__(self): return 2.5\n"
        "class Broken:\n def __float__(self): raise RuntimeError('freed')\n"
        "pdrun.progress(7, total=90, loss=Tensor(), lr=1e-3, bad=float('nan'), gone=Broken())"
    )
    status, _, err = agent.run(code)
    assert status == 0, err
    (said,) = agent.heard()
    assert said["total"] == 90
    assert said["numbers"] == {"loss": 2.5, "lr": 0.001, "bad": None}


def test_the_first_step_of_a_bad_value_is_told(agent: Agent) -> None:
    code = (
        "class Tensor(float):\n"
        "    is_cpu = True\n"
        "nan = float('nan')\n"
        "for step in range(9):\n"
        "    bad = nan if step in (2, 5, 6, 7, 8) else 1.0\n"
        "    late = Tensor(nan if step > 6 else 1.0)\n"
        "    pdrun.progress(step, loss=bad, norm=late, lr=nan if step < 8 else 0.1)\n"
        "time.sleep(0.3)\n"
        "pdrun.progress(9, other=1.0)"
    )
    status, _, err = agent.run(code)
    assert status == 0, err
    said = agent.heard()
    assert said[0]["bad"] == {"lr": 0}
    assert said[-2]["step"] == 8 and said[-2]["bad"] == {"loss": 5, "norm": 7}
    assert said[-1]["numbers"] == {"other": 1.0} and not said[-1]["bad"]


def test_a_number_keeps_no_graph(agent: Agent) -> None:
    code = (
        "class Plain:\n def __float__(self): return 1.5\n"
        "class Loss:\n def __float__(self): return 9.0\n def detach(self): return Plain()\n"
        "import gc, weakref\nloss = Loss()\nseen = weakref.ref(loss)\n"
        "pdrun.progress(1, loss=loss)\ndel loss\nprint(seen())"
    )
    assert agent.run(code)[:2] == (0, "None\n")
    (said,) = agent.heard()
    assert said["numbers"] == {"loss": 1.5}


def test_a_trace_counts_the_steps_of_the_loop(agent: Agent) -> None:
    (agent.folder / "trace.json").write_text("{}")
    code = (
        "import types\nmodule = types.ModuleType('tracer')\n"
        "class Trace:\n left = 3\n"
        " def count_step(self):\n  self.left -= 1; return self.left > 0\n"
        "traces = []\n"
        "def start(request, rank):\n"
        " assert request.endswith('/trace.json') and rank == '3'\n"
        " traces.append(Trace() if not traces else None); return traces[-1]\n"
        "module.start_trace = start; sys.modules['tracer'] = module\n"
        "elastic.TRACE_MODULE = 'tracer'\n"
        "CALL\n"
        "for step in range(8): call(step)\n"
        "assert traces[0].left == 0 and len(traces) == 1, traces\n"
    )
    calls = (
        "call = pdrun.progress",
        "def call(step):\n global due\n due = elastic.sample_step(step, lambda: {})",
    )
    for call in calls:
        status, _, err = agent.run(code.replace("CALL", call))
        assert status == 0, err


def test_a_run_samples_its_steps(agent: Agent) -> None:
    code = (
        "from time import monotonic as now\n"
        "for step in range(1000): due = elastic.sample_step(step, lambda: {'loss': 2.5})\n"
        "assert 0 < due - now() <= 5.0\n"
        "elastic.sample_step(1000, lambda: {'loss': float('nan')}, is_last=True)\n"
        "pdrun.progress(7)\n"
        "assert elastic.sample_step(1001, lambda: {}) == float('inf')\n"
        "assert elastic.sample_step(1002, lambda: {}, is_last=True) == float('inf')"
    )
    status, _, err = agent.run(code)
    assert status == 0, err
    said = agent.heard()
    assert said[0]["step"] == 0 and said[0]["sampled"] and said[0]["numbers"] == {"loss": 2.5}
    assert 2 <= len(said) <= 4  # one more if the wall clock passed a multiple of 5 s meanwhile
    assert said[-2]["step"] == 1000 and said[-2]["numbers"] == {"loss": None}
    assert said[-1]["step"] == 7 and "sampled" not in said[-1]


def test_the_plan_is_said_by_rank_0(agent: Agent) -> None:
    code = (
        "facts = [('mesh', 'dp=2', 'default'), ('x', 'y' * 9999, '')]\n"
        "assert elastic.takes_plan()\n"
        "elastic.report_plan(facts, (('cells 0', '0F0@0+1', ''),))\n"
        "elastic.report_plan(facts[:1], (('cells 0', 'z' * 99999, ''),))\n"
        "elastic.report_plan([('n', 'v' * 300, '')] * 999)"
    )
    status, _, err = agent.run(code, RANK="0")
    assert status == 0, err
    first, second, third = agent.heard()
    assert first["plan"][0] == ["mesh", "dp=2", "default"] and first["plan"][2][0] == "cells 0"
    assert len(first["plan"][1][1]) == elastic.MAX_FACT_CHARACTERS
    assert second["plan"] == [["mesh", "dp=2", "default"]], "cells that do not fit are left out"
    assert 50 < len(third["plan"]) < 256 and len(json.dumps(third)) < MAX_DATAGRAM_BYTES
    assert agent.run("assert not elastic.takes_plan()\nelastic.report_plan([])")[0] == 0
    assert agent.heard() == [], "rank 3 says nothing"


OWN_WORK = """
from types import SimpleNamespace as Fake
distributed = Fake(is_available=lambda: True, is_initialized=lambda: True,
                   get_backend=lambda: {backend!r})
sys.modules["torch"] = Fake(distributed=distributed, cuda=Fake(is_initialized=lambda: {cuda}))
elastic.RATE_SECONDS = 0.2
for step in range(8):
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    time.sleep(0.1)                     # as if it waited for another rank
    pdrun.progress(step, {busy})
"""


@pytest.mark.parametrize(
    ("backend", "cuda", "busy", "least", "most"),
    [
        ("cpu:gloo,cuda:nccl", False, None, 0.05, 0.09),
        ("gloo", True, None, 0.0, 0.0),
        ("nccl", False, None, 0.0, 0.0),
        ("gloo", False, 0.7, 0.7, 0.7),
    ],
)
def test_own_work_is_estimated_where_ranks_sleep_while_they_wait(
    agent: Agent, backend: str, cuda: bool, busy: float | None, least: float, most: float
) -> None:
    status, _, err = agent.run(OWN_WORK.format(backend=backend, cuda=cuda, busy=busy))
    assert status == 0, err
    said = agent.heard()
    assert said[-1]["step"] == 7
    assert least <= said[-1].get("busy", 0.0) <= most


def test_flops_become_a_share_of_the_peak(agent: Agent) -> None:
    code = (
        "now = [100.0]\ntime.monotonic = lambda: now[0]\n"
        "for step in range(31):\n pdrun.progress(step, flops=2e12, loss=1)\n now[0] += 0.5"
    )
    assert agent.run(code, PDRUN_PEAK_FLOPS="4e12")[0] == 0
    said = agent.heard()[-1]["numbers"]
    assert said == {"loss": 1, "mfu": 0.25}, "2 steps a second of 2e12, on 4 devices of 4e12"
    assert agent.run(code, PDRUN_PEAK_FLOPS="")[0] == 0
    assert agent.heard()[-1]["numbers"] == {"loss": 1}, "a CPU has no known peak"
    status, _, err = agent.run("pdrun.progress(1, flops=-1)")
    assert status == 1 and "flops must be a number" in err
    assert agent.run(code, PDRUN_PEAK_FLOPS="fast")[2].count("PDRUN_PEAK_FLOPS") <= 1


@pytest.mark.parametrize(
    "call",
    [
        "pdrun.progress(1, loss='low')",
        "pdrun.progress(1, **{'a b': 1})",
        "pdrun.progress(1, **{'a' * 65: 1})",
        "pdrun.progress(1, **{f'n{i}': 1 for i in range(33)})",
    ],
)
def test_what_is_no_number_is_an_error(agent: Agent, call: str) -> None:
    code, _, err = agent.run(call)
    assert code == 1 and "TypeError" in err
    assert agent.heard() == []


def test_the_longest_report_fits(agent: Agent) -> None:
    code = "pdrun.progress(2**52, **{'x' * 61 + f'{i:03}': -1.23456789e-100 for i in range(32)})"
    status, _, err = agent.run(code)
    assert status == 0, err
    (said,) = agent.heard()
    assert len(said["numbers"]) == 32
    assert len(json.dumps(said)) < MAX_DATAGRAM_BYTES


def test_numbers_of_other_kinds_are_fine_and_texts_are_not(agent: Agent) -> None:
    code = (
        "class Number:\n def __index__(self): return"
        " 9\npdrun.progress(Number())\npdrun.progress('9')"
    )
    status, _, err = agent.run(code)
    assert status == 1 and "__index__" in err
    assert [said["step"] for said in agent.heard()] == [9]


CHILDREN = {
    "fork": (
        "pid = os.fork()\nif pid == 0:\n pdrun.progress(99); elastic.saved(99);"
        " os._exit(0)\nos.waitpid(pid, 0)"
    ),
    "forked worker": (
        "import multiprocessing as mp\n"
        "p = mp.get_context('fork').Process(target=pdrun.progress, args=(99,))\np.start(); p.join()"
    ),
    "spawned worker": (
        "import multiprocessing as mp\np = mp.get_context('spawn').Process(target=pdrun.progress,"
        " args=(99,))\np.start(); p.join()"
    ),
}


@pytest.mark.parametrize("how", CHILDREN)
def test_children_of_a_worker_do_not_speak(agent: Agent, how: str) -> None:
    status, _, err = agent.run(
        f"pdrun.progress(1)\n{CHILDREN[how]}\ntime.sleep(0.15)\npdrun.progress(2)"
    )
    assert status == 0, err
    assert [said["step"] for said in agent.heard()] == [1, 2]


# Stopping
# ------------------------------------------------------------------------------------------------


def test_a_callback_saves_and_the_process_leaves_in_order(agent: Agent) -> None:
    process = agent.start(
        "import atexit\natexit.register(lambda: print('exit handler',"
        " flush=True))\n@elastic.on_stop\ndef save(): elastic.saved(12); print('saved',"
        " elastic.stopping(), flush=True)\ntry: up(); time.sleep(60)\nfinally: print('finally',"
        " flush=True)"
    )
    up(process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "saved True\nfinally\nexit handler\n"), err
    assert agent.heard()[-1]["saved"] == 12


def test_a_script_that_polls_ends_by_itself(agent: Agent) -> None:
    process = agent.start(
        "elastic.stopping(); up()\nwhile not elastic.stopping(): time.sleep(0.01)\nprint('end')"
    )
    up(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "end\n"
    assert process.returncode == 0


def test_a_second_sigterm_ends_a_script_that_only_polls(agent: Agent) -> None:
    process = agent.start(
        "elastic.stopping(); up()\nwhile not elastic.stopping(): time.sleep(0.01)\nup();"
        " time.sleep(60)"
    )
    up(process)
    process.send_signal(signal.SIGTERM)
    up(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


def test_the_handler_from_before_is_called_after_the_callbacks(agent: Agent) -> None:
    process = agent.start(
        "def before(number, frame): print('before', number, flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, before)\n"
        "elastic.on_stop(lambda: print('ours', flush=True)); up(); time.sleep(60)"
    )
    up(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "ours\nbefore 15\n"
    assert process.returncode == 5


def test_sigterm_that_was_ignored_only_tells(agent: Agent) -> None:
    process = agent.start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "elastic.on_stop(lambda: print('told', flush=True)); up()\n"
        "while not elastic.stopping(): time.sleep(0.01)\nprint('goes on')"
    )
    up(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "told\ngoes on\n"
    assert process.returncode == 0


def test_a_forked_child_ends_by_sigterm_as_ever_and_calls_nothing(agent: Agent) -> None:
    code = (
        "elastic.on_stop(lambda: print('parent only', flush=True))\n"
        "read, write = os.pipe()\npid = os.fork()\n"
        "if pid == 0: os.write(write, b'x'); time.sleep(60)\n"
        "os.read(read, 1); os.kill(pid, signal.SIGTERM); print(os.waitpid(pid, 0)[1])"
    )
    assert agent.run(code)[:2] == (0, "15\n")


def test_threads_read_the_flag_and_cannot_take_the_signal(agent: Agent) -> None:
    code = (
        "def other():\n"
        " try: elastic.on_stop(print)\n"
        " except RuntimeError as error: print('main thread' in str(error))\n"
        " print(elastic.stopping(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n"
        "thread = threading.Thread(target=other); thread.start(); thread.join()"
    )
    assert agent.run(code)[1] == "True\nFalse True\n"


def test_stacks_are_offered_on_a_signal_that_changes_nothing_else(agent: Agent) -> None:
    process = agent.start(
        "def here():\n up()\n time.sleep(1); time.sleep(1)\nelastic.attach(); here(); print('end')"
    )
    up(process)
    process.send_signal(elastic.STACKS_SIGNAL)
    assert process.communicate(timeout=30)[0] == "end\n"
    text = (agent.folder / f"{process.pid}.stacks").read_text()
    assert "in here" in text
    assert (agent.folder / f"{process.pid}.stacks").stat().st_mode & 0o777 == 0o600
