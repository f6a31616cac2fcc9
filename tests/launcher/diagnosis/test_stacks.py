"""Stacks of both tools, made comparable."""

from __future__ import annotations

from pdrun.launcher.diagnosis.stacks import (
    MAX_STACK_BYTES,
    group_stacks,
    is_program_running,
    normalize_stack,
    parse_threads,
    truncate_text,
)
from pdrun.rendezvous.protocol.codec import encode
from pdrun.rendezvous.protocol.messages import Envelope, StackGroup, Stacks

FAULTHANDLER = """Thread 0x00007f2b6ffff640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2b7ffff740 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "train.py", line 11 in train_step
  File "train.py", line 15 in <module>
  File "/x/launcher/stdlib_only/fork_server.py", line 300 in <module>
"""
MAIN = """File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
File "train.py", line 11 in train_step
File "train.py", line 15 in <module>"""
PY_SPY = """Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4720 (idle): "pdrun-progress"
    wait (threading.py:324)

Thread 4711 (idle): "MainThread"
    __futex_abstimed_wait_common (libc.so.6)
    0x7f01 (libtorch_cpu.so)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    <module> (train.py:15)
"""


def test_the_main_thread_of_each_tool():
    assert normalize_stack(FAULTHANDLER) == MAIN
    assert normalize_stack(PY_SPY).splitlines() == [
        "__futex_abstimed_wait_common (libc.so.6)",
        "0x (libtorch_cpu.so)",
        "all_reduce (torch/distributed/distributed_c10d.py:3252)",
        "<module> (train.py:15)",
    ]
    assert [thread.is_main for thread in parse_threads(PY_SPY)] == [True, False]


def test_what_differs_between_processes_is_blanked():
    other = FAULTHANDLER.replace("7f2b7", "7e000").replace("7f2b6", "7e111")
    assert normalize_stack(other) == normalize_stack(FAULTHANDLER)


def test_a_main_thread_that_waits_for_another_shows_it():
    text = FAULTHANDLER.replace(
        "/site-packages/torch/distributed/distributed_c10d.py", "/usr/lib/python3.11/queue.py"
    )
    lines = normalize_stack(text).splitlines()
    assert lines[3] == "thread 2:" and "threading.py" in lines[4]


def test_whether_the_program_is_still_at_work():
    ended = FAULTHANDLER[: FAULTHANDLER.index("Current")] + (
        "Current thread 0x00007f2b7ffff740 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1560 in _shutdown\n'
    )
    nothing = ended[: ended.index("  File", ended.index("Current"))] + "  <no Python frame>\n"
    assert [is_program_running(text) for text in (FAULTHANDLER, PY_SPY, ended, nothing, "")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_nothing_is_found_in_what_is_no_dump():
    assert normalize_stack("") == normalize_stack("hello\nworld\n") == ""


def test_groups_are_in_order_of_size():
    found = group_stacks([(3, "b"), (0, "a"), (2, "b"), (1, "c")])
    assert found == (StackGroup((2, 3), "b"), StackGroup((0,), "a"), StackGroup((1,), "c"))


def test_many_different_stacks_still_fit_into_a_message():
    stacks = [
        (rank, f'File "place{rank}.py", line 1 in wait\n' + 'File "x.py", line 2 in step\n' * 400)
        for rank in range(300)
    ]
    found = group_stacks(stacks)
    assert encode(Envelope("a" * 32, 0, 0, Stacks(0, found)))
    assert (
        len({group.stack for group in found}) == 300
        and len(group_stacks(stacks[:3])[0].stack) > 1000
    )


def test_a_long_stack_is_cut():
    text = truncate_text("ä" * MAX_STACK_BYTES)
    assert len(text.encode()) <= MAX_STACK_BYTES and text.endswith("\n...")
