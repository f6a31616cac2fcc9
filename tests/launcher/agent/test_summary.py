"""The last words of a job, as pictures."""

from __future__ import annotations

import pytest

from pdrun.launcher.agent.summary import (
    MAX_LINES,
    find_hints,
    format_duration,
    format_summary,
    sanitize_line,
)
from pdrun.rendezvous.policies.texts import describe_clean_exits
from pdrun.rendezvous.protocol.messages import Cause, Failure, Verdict

TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/train.py", line 5, in main
    raise ValueError("boom")
ValueError: boom
"""
CAUSE = Cause(
    "exception", 1, at=1.0, summary="ValueError: boom", traceback=TRACE, log="logs/r/0/rank_3.err"
)
FIRST = Failure(3, "node1", CAUSE)


def picture(verdict: Verdict, seconds: float = 12.3, log_dir: str = "logs/r") -> str:
    return "\n".join(format_summary(verdict, seconds=seconds, log_dir=log_dir))


def test_success_is_one_line():
    assert picture(Verdict(0, "all 4 workers succeeded")) == "job done in 12 s, logs in logs/r"
    assert picture(Verdict(0, ""), 0.31, "") == "job done in 0.3 s"


def test_an_exception():
    other = Failure(5, "node2", Cause("exit", 9, summary="exit code 9", log="logs/r/0/rank_5.err"))
    verdict = Verdict(1, "rank 3 on node1 failed: ValueError: boom", FIRST, (other,), victims=2)
    assert (
        picture(verdict)
        == """\
job failed after 12 s: rank 3 on node1 failed: ValueError: boom
  the traceback of rank 3 on node1 (exit code 1):
    Traceback (most recent call last):
      File "/home/me/train.py", line 9, in <module>
        main()
      File "/home/me/train.py", line 5, in main
        raise ValueError("boom")
    ValueError: boom
  log of rank 3: logs/r/0/rank_3.err
  2 other workers were stopped because of it
  rank 5 on node2 failed independently: exit code 9 (logs/r/0/rank_5.err)
exit code 1, logs in logs/r"""
    )


def test_a_signal_with_last_lines():
    cause = Cause(
        "signal",
        137,
        signal=9,
        summary="killed by SIGKILL, not by pdrun",
        tail=("step 7", "", "loss 2.5"),
    )
    verdict = Verdict(
        137,
        "rank 0 on a failed: killed by SIGKILL, not by pdrun",
        Failure(0, "a", cause),
        victims=1,
    )
    assert (
        picture(verdict, 200, "")
        == """\
job failed after 3 min 20 s: rank 0 on a failed: killed by SIGKILL, not by pdrun
  the last lines of rank 0 on a (SIGKILL, exit code 137):
    step 7
    loss 2.5
  1 other worker was stopped because of it
  hint: a process outside pdrun killed it, often the kernel for lack of memory: check 'dmesg' on that node
exit code 137"""
    )


def test_a_silent_worker():
    cause = Cause("exit", 42, summary="exit code 42", log="logs/r/0/rank_0.err")
    verdict = Verdict(42, "rank 0 on a failed: exit code 42", Failure(0, "a", cause))
    assert (
        picture(verdict, 1)
        == """\
job failed after 1.0 s: rank 0 on a failed: exit code 42
  rank 0 on a printed nothing (exit code 42)
exit code 42, logs in logs/r"""
    )


def test_lines_that_were_just_revealed_are_not_said_again():
    cause = Cause("exit", 3, summary="exit code 3", tail=("why",), log="logs/r/0/rank_0.out")
    verdict = Verdict(3, "rank 0 on a failed: exit code 3", Failure(0, "a", cause))
    assert (
        "\n".join(format_summary(verdict, seconds=1, log_dir="logs/r", is_already_shown=True))
        == """\
job failed after 1.0 s: rank 0 on a failed: exit code 3
  the last output of rank 0 on a (exit code 3) is shown above
  log of rank 0: logs/r/0/rank_0.out
exit code 3, logs in logs/r"""
    )
    assert "  the last line of rank 0 on a (exit code 3):\n    why\n" in picture(verdict)


def test_a_lost_worker_is_not_said_to_have_been_silent():
    cause = Cause("lost", 137, signal=9, summary="the keeper process 7 was killed by SIGKILL")
    verdict = Verdict(
        137, f"rank 0 on a failed: {cause.summary}", Failure(0, "a", cause), victims=3
    )
    assert (
        picture(verdict, 1, "")
        == """\
job failed after 1.0 s: rank 0 on a failed: the keeper process 7 was killed by SIGKILL
  3 other workers were stopped because of it
exit code 137"""
    )


def test_stopped_and_lost():
    assert (
        picture(Verdict(130, "stopped by SIGINT on node0"), 5)
        == """\
job stopped after 5.0 s by SIGINT on node0
exit code 130, logs in logs/r"""
    )
    assert (
        picture(Verdict(69, "host1 was lost: silent for 10 s"), 5, "")
        == """\
job failed after 5.0 s: host1 was lost: silent for 10 s
exit code 69"""
    )
    assert picture(Verdict(124, "the time limit of 5 s has passed"), 5, "").startswith(
        "job stopped after 5.0 s: the time limit of 5 s has passed\n"
    )


def test_never_longer_than_a_screen():
    frames = "".join(f'  File "/a.py", line {number}, in f\n    f()\n' for number in range(500))
    long = Cause(
        "exception",
        1,
        summary="RecursionError: x",
        traceback=f"Traceback:\n{frames}RecursionError: x\n",
    )
    others = tuple(Failure(rank, "n", Cause("exit", 1, summary="exit code 1")) for rank in range(8))
    lines = format_summary(
        Verdict(1, "r" * 5000, Failure(0, "n", long), others, 99), seconds=1, log_dir="d"
    )
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= 320
    assert "    RecursionError: x" in lines
    assert lines[-1] == "exit code 1, logs in d"
    assert any("lines left out" in line for line in lines)


def test_text_cannot_command_the_terminal():
    assert (
        sanitize_line("\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \u202e\r")
        == "red \\x1b]0;title\\x07 \\x9b2J \\u202e\\x0d"
    )
    cause = Cause("exit", 1, summary="x", tail=("\x1b[2Jcleared",))
    assert "\x1b" not in picture(Verdict(1, "\x1b[2J", Failure(0, "\x1b[1mnode", cause)))


def test_hints_are_given_where_they_help_only():
    assert list(find_hints(CAUSE)) == []
    assert "memory limit" in next(iter(find_hints(Cause("oom", 137, signal=9))))
    assert "smaller batch" in next(
        iter(find_hints(Cause("exception", 1, summary="OutOfMemoryError: CUDA out of memory")))
    )
    assert "/dev/shm" in next(iter(find_hints(Cause("signal", 135, signal=7))))
    assert "network" in next(iter(find_hints(Cause("communication", 1))))
    assert next(iter(find_hints(Cause("communication", 1), "", "rank 1 had ended"))).startswith(
        "rank 1 had ended: do"
    )
    missing = Cause("exception", 1, summary="ModuleNotFoundError: No module named 'x'")
    assert "workers, /usr/bin/python3?" in next(iter(find_hints(missing, "/usr/bin/python3")))
    assert "interpreter of the workers?" in next(iter(find_hints(missing)))


FULL_DISKS = (
    "OSError: [Errno 28] No space left on device: 'x'",
    "OSError: [Errno 122] Disk quota exceeded",
    "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 662",
    "RuntimeError: basic_ios::clear: iostream error",
    "RuntimeError: PytorchStreamWriter failed writing file data/3: file write failed",
)


@pytest.mark.parametrize(
    ("summary", "hint"),
    [
        *((text, "df -h") for text in FULL_DISKS),
        ("RuntimeError: ifa != nullptr. Unable to find address for: eth7", "--only variables"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found 1)", "--only driver"),
        ("RuntimeError: CUDA error: invalid device ordinal", "visibility"),
        ("ValueError: unexpected value", ""),
    ],
)
def test_hints_by_the_text_of_the_error(summary: str, hint: str) -> None:
    found = list(find_hints(Cause("exception", 1, summary=summary)))
    assert [hint in one for one in found] == ([True] if hint else [])


def test_durations():
    assert [format_duration(value) for value in (0.04, 9.94, 59.6, 119, 125, 7260)] == [
        "0.0 s",
        "9.9 s",
        "60 s",
        "119 s",
        "2 min 5 s",
        "2 h 1 min",
    ]


def test_who_had_ended_well_is_a_hint_even_after_a_long_reason() -> None:
    cause = Cause("communication", 1, summary="RuntimeError: " + "x" * 400)
    ended = describe_clean_exits({3: "b", 5: "c"})
    reason = f"rank 0 on a failed: {cause.summary}; {ended} (failed again after 2 restarts)"
    lines = format_summary(Verdict(1, reason, first=Failure(0, "a", cause)), seconds=3.0)
    assert ended not in lines[0]
    (hint,) = (line for line in lines if "hint" in line)
    assert hint.startswith(
        "  hint: rank 3 on b and 1 other had ended before, without an error: do all ranks make"
    )


def test_what_the_nodes_differ_in_is_noted_and_never_cut_off() -> None:
    cause = Cause(
        "exception", 1, summary="x", traceback="\n".join(f"  line {i}" for i in range(99))
    )
    note = "torch differs: '2.13.0' on a, '2.12.1\x1b[2J' on b"
    verdict = Verdict(1, "rank 0 failed", first=Failure(0, "a", cause), notes=(note,) * 3)
    lines = format_summary(verdict, seconds=3.0)
    assert lines[-2].startswith("  note: torch differs: '2.13.0' on a") and "\x1b" not in lines[-2]
    assert len(lines) <= MAX_LINES and lines[-1] == "exit code 1"
