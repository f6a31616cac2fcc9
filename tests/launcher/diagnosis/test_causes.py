"""Why a worker ended: evidence in, cause out, one line a case."""

from __future__ import annotations

import errno
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import PeerLost
from pdrun.launcher.diagnosis.causes import Evidence, find_cause
from pdrun.launcher.supervisor.events import SpawnFailed
from pdrun.rendezvous.policies.verdict import ReportedFailure, find_first_cause
from pdrun.rendezvous.protocol.messages import Failure


def trace(error: str, *frames: tuple[str, str]) -> str:
    """A traceback as Python prints it."""
    frames = frames or (("/home/me/train.py", "<module>"),)
    lines = [f'  File "{file}", line 3, in {function}\n    code()' for file, function in frames]
    return "Traceback (most recent call last):\n" + "\n".join(lines) + f"\n{error}\n"


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by"
    " peer [::1]:3131"
)
DISTRIBUTED = ("/venv/torch/distributed/distributed_c10d.py", "all_reduce")
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process"
    " exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed"
    " possibly due to a network error"
)
CONNECT_FULL_MESH = (
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/pair.cc:144] no"
    " error"
)
EXCEPTIONS = [
    ("ValueError: boom", (), "exception", "ValueError: boom"),
    ("KeyError: 'x'", (DISTRIBUTED,), "exception", "KeyError: 'x'"),
    (GLOO, (), "communication", GLOO),
    (CONNECT_FULL_MESH, (), "communication", CONNECT_FULL_MESH),
    (
        "RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection reset by peer",
        (),
        "communication",
        None,
    ),
    (
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        (),
        "communication",
        None,
    ),
    (NCCL, (), "communication", None),
    (
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients.",
        (),
        "communication",
        None,
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        (),
        "communication",
        None,
    ),
    (
        "torch.distributed.DistNetworkError: EADDRINUSE, Address already in use",
        (),
        "exception",
        None,
    ),
    (
        "torch.distributed.DistBackendError: NCCL error: Duplicate GPU detected : rank 0",
        (),
        "exception",
        None,
    ),
    ("torch.distributed.DistBackendError: NCCL error: unhandled cuda error", (), "exception", None),
    (
        "RuntimeError: The Inner error is reported as above. EI0006: Getting socket times out",
        (),
        "communication",
        None,
    ),
    ("BrokenPipeError: [Errno 32] Broken pipe", (DISTRIBUTED,), "communication", None),
    (
        "EOFError",
        (("/usr/lib/python3.11/multiprocessing/connection.py", "_recv"),),
        "communication",
        "EOFError",
    ),
    ("EOFError: EOF when reading a line", (), "exception", None),
    (
        "ConnectionResetError: [Errno 104] Connection reset",
        (("/venv/requests/api.py", "get"),),
        "exception",
        None,
    ),
    ("RuntimeError: Connection reset by peer while reading s3://bucket", (), "exception", None),
    (
        "pdrun.errors.PeerLost: step 3: the losses cannot end: another rank is gone (x)",
        (),
        "communication",
        None,
    ),
    (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        (),
        "exception",
        None,
    ),
]


@pytest.mark.parametrize(
    ("error", "frames", "kind", "summary"), EXCEPTIONS, ids=[case[0][:50] for case in EXCEPTIONS]
)
def test_exceptions(error, frames, kind, summary):
    cause = find_cause(Evidence(status=1 << 8, at=20.0, traceback=(10.0, trace(error, *frames))))
    assert (cause.kind, cause.code, cause.at, cause.retry) == (kind, 1, 10.0, True)
    assert summary is None or cause.summary == summary[:500]
    assert error in cause.traceback


STATUS = [
    (0, "ok", 0, 0),
    (42 << 8, "exit", 42, 0),
    (255 << 8, "exit", 255, 0),
    (1 << 8, "exit", 1, 0),
    (signal.SIGSEGV, "signal", 139, 11),
    (signal.SIGSEGV | 0x80, "signal", 139, 11),
    (signal.SIGKILL, "signal", 137, 9),
    (signal.SIGABRT, "signal", 134, 6),
    (signal.SIGTERM, "signal", 143, 15),
    (64, "signal", 192, 64),
]


@pytest.mark.parametrize(("status", "kind", "code", "number"), STATUS)
def test_codes_and_signals(status, kind, code, number):
    cause = find_cause(Evidence(status=status, at=5.0, tail=("last",), log="/log"))
    assert (cause.kind, cause.code, cause.signal, cause.at) == (kind, code, number, 5.0)
    assert (cause.log, cause.tail) == ("/log", () if kind == "ok" else ("last",))


def test_plain_words():
    assert (
        find_cause(Evidence(signal.SIGSEGV, 1.0)).summary
        == "killed by SIGSEGV (segmentation fault)"
    )
    assert find_cause(Evidence(signal.SIGKILL, 1.0)).summary == "killed by SIGKILL, not by pdrun"
    assert find_cause(Evidence(3 << 8, 1.0)).summary == "exit code 3"
    said = find_cause(
        Evidence(78 << 8, 1.0, tail=("a", "pdrun: error: RANK: 'x' is not a whole number"))
    )
    assert (said.kind, said.code, said.summary) == ("exit", 78, "RANK: 'x' is not a whole number")


def test_out_of_memory_needs_proof():
    assert find_cause(Evidence(signal.SIGKILL, 1.0, oom_kills=1)).kind == "oom"
    assert find_cause(Evidence(signal.SIGSEGV, 1.0, oom_kills=1)).kind == "signal"


def test_a_traceback_counts_only_with_a_failing_exit():
    assert find_cause(Evidence(0, 9.0, traceback=(1.0, trace("ValueError: caught")))).kind == "ok"
    cause = find_cause(Evidence(3 << 8, 9.0, traceback=(1.0, trace("ValueError: caught"))))
    assert (cause.kind, cause.code, cause.at) == ("exception", 3, 1.0)


@pytest.mark.parametrize(
    "status", [1 << 8, 0, signal.SIGTERM, signal.SIGKILL, 42 << 8, signal.SIGSEGV]
)
def test_what_ends_after_our_order_is_stopped(status):
    cause = find_cause(
        Evidence(
            status,
            9.0,
            traceback=(8.5, trace("KeyboardInterrupt")),
            stopped_at=8.0,
            stop_signals=(15, 9),
        )
    )
    assert cause.kind == ("stopped" if status else "ok")


def test_what_began_before_our_order_is_its_own():
    before = (7.9, trace("ValueError: boom"))
    cause = find_cause(
        Evidence(1 << 8, 9.0, traceback=before, stopped_at=8.0)
    )  # while our signal was held back
    assert (cause.kind, cause.code, cause.at) == ("exception", 1, 7.9)
    # our SIGTERM caught it on its way out, before Python could leave with 1: or it had lived on
    cause = find_cause(
        Evidence(signal.SIGTERM, 9.0, traceback=before, stopped_at=8.0, stop_signals=(15,))
    )
    assert (cause.kind, cause.code, cause.signal) == ("suspect", 1, 0)


HANDLED = trace("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("age", [0.01, 1.5, 9.0, 600.0])
@pytest.mark.parametrize(
    "status", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, 1 << 8, 3 << 8, 143 << 8]
)
@pytest.mark.parametrize("survived", [False, True])
def test_an_end_by_our_order_never_proves_a_traceback(age, status, survived):
    cause = find_cause(
        Evidence(
            status,
            20.5,
            traceback=(20.0 - age, HANDLED),
            survived=survived,
            stopped_at=20.0,
            stop_signals=(15, 9),
        )
    )
    assert cause.kind == ("stopped" if survived else "suspect")


OWN_END = [
    # status, seconds from the traceback to the end, out-of-memory kills -> kind, code
    (1 << 8, 0.5, 0, "exception", 1),
    (1 << 8, 900.0, 0, "exception", 1),
    (3 << 8, 0.5, 0, "exception", 3),
    (3 << 8, 60.0, 0, "exit", 3),
    (signal.SIGABRT, 5.0, 0, "exception", 134),
    (signal.SIGSEGV, 60.0, 0, "signal", 139),
    (signal.SIGKILL, 0.5, 0, "exception", 137),
    (signal.SIGKILL, 5.0, 0, "signal", 137),
    (signal.SIGKILL, 0.5, 1, "oom", 137),
    (signal.SIGTERM, 60.0, 0, "signal", 143),
]


@pytest.mark.parametrize(("status", "age", "kills", "kind", "code"), OWN_END)
def test_a_traceback_explains_a_death_that_is_near(status, age, kills, kind, code):
    cause = find_cause(Evidence(status, 1000.0, traceback=(1000.0 - age, HANDLED), oom_kills=kills))
    assert (cause.kind, cause.code) == (kind, code)
    assert cause.at == (1000.0 - age if kind == "exception" else 1000.0)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (signal.SIGKILL, "signal"),
        (signal.SIGTERM, "signal"),
        (1 << 8, "exception"),
        (3 << 8, "exception"),
        (signal.SIGABRT, "exception"),
    ],
)
def test_what_was_caught_explains_no_signal_of_others(status, kind):
    """
    A program that logs an exception and goes on may be killed in the next moment, by a lack of
    memory say.
    """
    assert (
        find_cause(Evidence(status, 1000.0, traceback=(999.5, HANDLED), survived=True)).kind == kind
    )


def test_a_child_s_crash_long_ago_does_not_hide_our_order():
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n "
        ' File "a.py"\n'
    )
    cause = find_cause(
        Evidence(signal.SIGTERM, 9.0, traceback=(1.0, stack), stopped_at=8.0, stop_signals=(15,))
    )
    assert (cause.kind, cause.traceback) == ("stopped", "")


def test_a_kill_by_others_is_no_stop_of_ours():
    assert find_cause(Evidence(signal.SIGTERM, 9.0)).kind == "signal"
    assert (
        find_cause(Evidence(signal.SIGKILL, 9.0, stopped_at=8.0, stop_signals=(15,))).kind
        == "stopped"
    )


ABORT = (
    (
        "[rank3]:[E1127 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum=5)"
    ),
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [Rank 3] Some NCCL operations have failed or timed out.",
)


def test_an_abort_about_a_peer_is_communication():
    assert find_cause(Evidence(signal.SIGABRT, 9.0, tail=ABORT)).kind == "communication"
    assert (
        find_cause(Evidence(signal.SIGABRT, 9.0, tail=("Assertion `x' failed.",))).kind == "signal"
    )
    cuda = (
        "terminate called after throwing an instance of 'c10::Error'",
        "  what():  CUDA error: out of memory",
    )
    assert find_cause(Evidence(signal.SIGABRT, 9.0, tail=cuda)).kind == "signal"


def test_an_abort_at_the_end_of_a_finished_script_says_what_it_was():
    tail = ("step 10 loss 0.3", "terminate called without an active exception")
    cause = find_cause(Evidence(signal.SIGABRT, 9.0, tail=tail))
    assert cause.kind == "signal"
    assert "a thread (of torch.distributed, as a rule) still ran when Python" in cause.summary
    assert "destroy_process_group()" in cause.summary
    other = find_cause(Evidence(signal.SIGABRT, 9.0, tail=("Assertion `x' failed.",)))
    assert "thread" not in other.summary


def test_a_victim_of_the_parallel_runtime_says_so_in_one_line():
    said = f"step 3: the losses cannot end: {PeerLost.SIGN} (Broken pipe)"
    cause = find_cause(Evidence(69 << 8, 9.0, tail=("step 2", f"pdrun: error: {said}")))
    assert (cause.kind, cause.code, cause.summary) == ("communication", 69, said)
    assert find_cause(Evidence(69 << 8, 9.0, tail=(said,))).kind == "exit", (
        "only pdrun's own words count"
    )


def test_an_aborts_reason_is_found_above_a_long_stack():
    stack = "Fatal Python error: Aborted\n\n" + "".join(
        f'  File "/a.py", line {number} in f\n' for number in range(60)
    )
    recent = "\n".join(ABORT) + "\n" + stack
    cause = find_cause(
        Evidence(
            signal.SIGABRT,
            9.0,
            traceback=(7.0, stack),
            tail=tuple(recent.splitlines()[-20:]),
            recent=recent,
        )
    )
    assert cause.kind == "communication"
    assert cause.summary == "[Rank 3] Some NCCL operations have failed or timed out."


def test_a_crash_keeps_faulthandlers_stack_and_its_earlier_time():
    stack = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n "
        ' File "a.py"\n'
    )
    cause = find_cause(Evidence(signal.SIGSEGV, 9.0, traceback=(7.0, stack)))
    assert (cause.kind, cause.at, cause.traceback) == ("signal", 7.0, stack)
    # the core was still being written when the others had already been stopped
    cause = find_cause(
        Evidence(signal.SIGSEGV, 9.0, traceback=(7.0, stack), stopped_at=8.0, stop_signals=(15,))
    )
    assert (cause.kind, cause.code) == ("signal", 139)


def test_a_wrapped_communication_error_is_still_one():
    text = (
        trace(GLOO) + "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    cause = find_cause(
        Evidence(1 << 8, 9.0, traceback=(1.0, text + trace("TrainingError: step 7 failed")))
    )
    assert (cause.kind, cause.summary) == ("communication", "TrainingError: step 7 failed")


@pytest.mark.parametrize(
    ("number", "code", "retry"),
    [
        (errno.ENOENT, 127, False),
        (errno.EACCES, 126, False),
        (errno.ENOEXEC, 126, False),
        (errno.EAGAIN, 126, True),
    ],
)
def test_not_started(number, code, retry):
    cause = find_cause(Evidence(None, 1.0, spawn_failure=SpawnFailed(0, number, "/x/tool: reason")))
    assert (cause.kind, cause.code, cause.retry) == ("startup", code, retry)
    assert "/x/tool: reason" in cause.summary


HOPELESS = [
    (trace("ModuleNotFoundError: No module named 'nope'"), False),
    (
        trace(
            "ModuleNotFoundError: No module named 'nope'",
            ("/a.py", "<module>"),
            ("/b.py", "<module>"),
        ),
        False,
    ),
    (
        trace(
            "ModuleNotFoundError: No module named 'nope'", ("/a.py", "<module>"), ("/a.py", "main")
        ),
        True,
    ),
    (
        '  File "/a.py", line 1\n    def broken(:\n               ^\nSyntaxError: invalid syntax\n',
        False,
    ),
    (trace("ValueError: boom"), True),
]


@pytest.mark.parametrize(("text", "retry"), HOPELESS)
def test_what_cannot_succeed_is_not_tried_again(text, retry):
    cause = find_cause(Evidence(1 << 8, 2.0, traceback=(1.0, text)))
    assert (cause.kind, cause.retry) == ("exception", retry)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("python: can't open file '/x/t.py': [Errno 2] No such file or directory", 2 << 8),
        ("/usr/bin/python3: No module named trainer", 1 << 8),
        (
            (
                "SyntaxError: Non-UTF-8 code starting with '\\xe9' in file /x/t.py on line 1, but"
                " no encoding declared"
            ),
            1 << 8,
        ),
        ("SyntaxError: encoding problem: nonsense", 1 << 8),
    ],
)
def test_a_program_that_vanished_or_cannot_be_read_is_a_start_failure(line, status):
    cause = find_cause(Evidence(status, 2.0, tail=(line,)))
    assert (cause.kind, cause.retry, cause.summary) == ("startup", False, line)


def test_unkillable():
    cause = find_cause(Evidence(None, 9.0, stopped_at=1.0))
    assert (cause.kind, cause.code) == ("stopped", 137)


def test_a_cause_is_small_enough_to_travel():
    huge = trace("ValueError: " + "x" * 1000, *[("/a.py", f"f{number}") for number in range(5000)])
    cause = find_cause(Evidence(1 << 8, 1.0, traceback=(1.0, huge), tail=("y" * 2000,) * 90))
    assert len(cause.traceback) <= 65536 + 8
    assert len(cause.summary) <= 500
    assert (len(cause.tail), max(map(len, cause.tail))) == (20, 500)
    assert cause.traceback.endswith("x\n")


ENDS = st.sampled_from([signal.SIGTERM, signal.SIGKILL, 1 << 8, 3 << 8])
OWN_DEATHS = st.one_of(
    st.sampled_from([signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, 3 << 8, 255 << 8]).map(
        lambda status: Evidence(status, 10.0)
    ),
    st.just(Evidence(1 << 8, 10.2, traceback=(10.0, trace("KeyError: 'own'")))),
)


def first(*seen: Evidence) -> int:
    found = find_first_cause(
        [
            ReportedFailure(Failure(rank, "node0", find_cause(one)), rank, 0.0)
            for rank, one in enumerate(seen)
        ]
    )
    return found.failure.rank if found else -1


@given(ENDS, st.floats(0.001, 1000.0), st.booleans(), OWN_DEATHS)
def test_who_died_by_itself_goes_before_whoever_printed_a_traceback_and_was_stopped(
    status, age, survived, own
):
    handled = Evidence(
        status,
        11.0,
        traceback=(10.1 - age, HANDLED),
        survived=survived,
        stopped_at=10.1,
        stop_signals=(15, 9),
    )
    assert first(handled, own) == 1


@given(ENDS, st.floats(0.2, 1000.0), st.booleans())
def test_whoever_hangs_on_its_way_out_goes_before_its_victims(status, age, survived):
    victim = Evidence(1 << 8, 10.0, traceback=(9.5, trace(GLOO)))
    hanging = Evidence(
        status,
        11.0,
        traceback=(10.1 - age, HANDLED),
        survived=survived,
        stopped_at=10.1,
        stop_signals=(15, 9),
    )
    assert first(victim, hanging) == (0 if survived else 1)
