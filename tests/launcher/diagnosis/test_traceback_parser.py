"""
The last traceback on stderr: found without decorators, in the text that real interpreters print.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.diagnosis.traceback_parser import (
    LAST_WORD_LINES,
    MAX_TRACEBACK_BYTES,
    Traceback,
    TracebackFinder,
)
from tests.lib.tiers import thorough

PLAIN = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: boom
"""


def read(data: bytes, at: float = 1.0) -> Traceback | None:
    finder = TracebackFinder()
    finder.feed(data, at)
    finder.finish()
    return finder.last_traceback


def need(data: bytes) -> Traceback:
    found = read(data)
    assert found is not None
    return found


def stderr_of(code: str, tmp_path: Path, *flags: str) -> bytes:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, *flags, str(script)], capture_output=True, timeout=60
    ).stderr


REAL = {
    "plain": ("def f():\n    raise ValueError('boom')\nf()", "ValueError: boom", 1),
    "no message": ("raise KeyError", "KeyError", 1),
    "several lines": ("raise RuntimeError('one\\ntwo: x\\n  three')", "RuntimeError: one", 1),
    "during handling": (
        "try: 1/0\nexcept ZeroDivisionError: raise KeyError('k')",
        "KeyError: 'k'",
        2,
    ),
    "from": ("try: 1/0\nexcept ZeroDivisionError as e: raise OSError('o') from e", "OSError: o", 2),
    "note": ("e = ValueError('v'); e.add_note('a note'); raise e", "ValueError: v", 1),
    "syntax in an import": ("exec('def f(:')", "SyntaxError: invalid syntax", 1),
    "own class": (
        (
            "class MyError(Exception): pass\ndef f():\n  class Inner(MyError): pass\n  raise"
            " Inner('i')\nf()"
        ),
        "f.<locals>.Inner: i",
        1,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_what_python_prints(name: str, tmp_path: Path) -> None:
    code, summary, headers = REAL[name]
    data = stderr_of(code, tmp_path)
    found = need(b"step 1\nstep 2\n" + data)
    assert found.summary == summary
    assert found.text.count("Traceback (most recent call last)") == headers
    assert found.text.strip() == data.decode().strip()
    assert found.is_last_word


def test_exception_groups(tmp_path: Path) -> None:
    data = stderr_of("raise ExceptionGroup('many', [ValueError(1), TypeError(2)])", tmp_path)
    found = need(data)
    assert found.text.strip("\n") == data.decode().strip("\n")
    assert found.summary == "ExceptionGroup: many (2 sub-exceptions)"


def test_a_group_as_the_cause_of_another(tmp_path: Path) -> None:
    code = (
        "try: raise ExceptionGroup('many', [ValueError(1)])\nexcept* ValueError as e: raise"
        " KeyError('k') from e"
    )
    data = stderr_of(code, tmp_path)
    assert need(data).text.strip("\n") == data.decode().strip("\n")


def test_a_syntax_error_of_the_script_has_no_header(tmp_path: Path) -> None:
    found = need(stderr_of("x = 1\ndef f(:\n  pass", tmp_path))
    assert (found.kind, found.summary) == ("syntax", "SyntaxError: invalid syntax")
    assert found.text.startswith('  File "')


def test_a_crash_that_faulthandler_tells(tmp_path: Path) -> None:
    found = need(
        stderr_of("import ctypes\nprint('a')\nctypes.string_at(0)", tmp_path, "-X", "faulthandler")
    )
    assert (found.kind, found.summary) == ("fatal", "Fatal Python error: Segmentation fault")
    assert "string_at" in found.text


def test_torch_marks_each_line_with_its_rank() -> None:
    marked = b"".join(b"[rank3]: " + line + b"\n" for line in PLAIN.splitlines())
    assert need(marked).text == PLAIN.decode()


def test_a_traceback_without_a_last_line_end() -> None:
    assert need(PLAIN.rstrip()).text == PLAIN.decode()


def test_exceptions_that_python_ignores_are_no_cause(tmp_path: Path) -> None:
    code = (
        "class A:\n  def __del__(self): raise ValueError('late')\na = A()\nraise KeyError('true')"
    )
    found = need(stderr_of(code, tmp_path))
    assert found.summary == "KeyError: 'true'"
    assert "late" not in found.text
    assert (
        read(stderr_of("class A:\n  def __del__(self): raise ValueError('x')\nA()", tmp_path))
        is None
    )


NOISE = (
    b"[W1127 10:00:00.123 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not"
    b" called\n[rank0]:[W1127 10:00:00.123 ProcessGroupNCCL.cpp:1496] Warning:"
    b" more\n/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked"
    b" semaphore\n  warnings.warn('resource_tracker: There appear to be 1 leaked')\n"
)


def test_noise_of_a_shutdown_does_not_count() -> None:
    found = need(PLAIN + NOISE)
    assert (found.text, found.lines_after) == (PLAIN.decode(), 0)


def test_own_lines_after_it_are_counted() -> None:
    found = need(PLAIN + b"\nretrying\n2026-01-01 going on\n")
    assert (found.text, found.lines_after, found.is_last_word) == (PLAIN.decode(), 2, True)
    assert not need(PLAIN + b"\n" + b"step\n" * (LAST_WORD_LINES + 1)).is_last_word


def test_one_that_is_long_past_is_forgotten() -> None:
    assert read(PLAIN + b"\n" + b"step\n" * 10_000) is None


def test_steps_printed_right_after_it_are_not_its_message_for_ever() -> None:
    found = read(PLAIN + b"".join(b"step %d loss 1.0\n" % step for step in range(150)))
    assert found is None or not found.is_last_word


def test_the_last_of_several_counts_with_its_own_time() -> None:
    finder = TracebackFinder()
    finder.feed(PLAIN, 1.0)
    finder.feed(b"\nretrying\nTraceback (most", 2.0)
    finder.feed(b' recent call last):\n  File "x.py", line 1, in f\nTypeError: second\n', 3.0)
    assert finder.last_traceback is not None
    assert (
        finder.last_traceback.at,
        finder.last_traceback.summary,
        finder.last_traceback.lines_after,
    ) == (
        2.0,
        "TypeError: second",
        0,
    )


def test_a_data_loader_worker_s_traceback_is_part_of_the_message() -> None:
    text = PLAIN.replace(
        b"boom\n", b"Caught KeyError in DataLoader worker process 0.\nOriginal " + PLAIN
    )
    found = need(text)
    assert found.text == text.decode()
    assert found.text.startswith("Traceback")


def test_memory_is_bounded_and_the_end_is_kept() -> None:
    frames = b'  File "deep.py", line 1, in f\n    f()\n' * 20_000
    found = need(b"Traceback (most recent call last):\n" + frames + b"RecursionError: deep\n")
    assert len(found.text) <= MAX_TRACEBACK_BYTES + 1
    assert found.text.endswith("RecursionError: deep\n")
    finder = TracebackFinder()
    for _ in range(100):
        finder.feed(b"x" * 100_000, 1.0)
    assert len(finder._partial) <= MAX_TRACEBACK_BYTES


@given(st.lists(st.integers(0, 2000), max_size=20))
def test_any_cutting_finds_the_same(cuts: list[int]) -> None:
    chain = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    data = b"log\n" + PLAIN + chain + PLAIN + NOISE
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    finder = TracebackFinder()
    for low, high in pairwise(edges):
        finder.feed(data[low:high], 1.0)
    finder.finish()
    assert finder.last_traceback == read(data)


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", PLAIN, PLAIN[:60], b"Fatal Python error: x\n"]),
    st.binary(),
)
def test_no_input_breaks_it(before: bytes, middle: bytes, after: bytes) -> None:
    read(before + middle + after)


def test_a_box_of_rich_is_read(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    data = stderr_of(
        "from rich.traceback import install\ninstall()\nraise ValueError('boxed')", tmp_path
    )
    found = need(data + NOISE)
    assert (found.summary, found.lines_after) == ("ValueError: boxed", 0)


BAR = "\rEpoch 1:  10%|\u2588         | 1/10 [00:00<00:01,  8.1it/s, loss=0.1]".encode()
BARS = (BAR, BAR * 3, b"Loading ... ", b"50%|#####     |\r")
MARKED = b"".join(b"[rank0]: " + line + b"\n" for line in PLAIN.splitlines())
GROUP = b"""  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +------------------------------------
"""
FATAL = b"""Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "a.py", line 1 in <module>
"""


@pytest.mark.parametrize(
    ("bar", "size"),
    [
        *((bar, 1 << 20) for bar in (BAR * 3000, *BARS)),
        *((bar, 37) for bar in (BAR * 300, *BARS)),
        thorough(BAR * 3000, 37),
    ],
    ids=lambda value: len(value) if isinstance(value, bytes) else value,
)
@pytest.mark.parametrize(
    ("text", "plain"),
    [(PLAIN, PLAIN), (MARKED, PLAIN), (GROUP, GROUP), (FATAL, FATAL)],
    ids=["plain", "marked", "group", "fatal"],
)
@pytest.mark.parametrize(
    "before", [b"", PLAIN, PLAIN + b"\nstep 1\n", b"2026-01-01 10:00:00 INFO x\n"], ids=len
)
def test_one_behind_a_bar_is_found_whole_and_with_its_own_time(
    bar: bytes, text: bytes, plain: bytes, before: bytes, size: int
) -> None:
    finder = TracebackFinder()
    for at, data in ((1.0, before + bar), (99.0, text)):
        for low in range(0, len(data), size):
            finder.feed(data[low : low + size], at)
    finder.finish()
    found = finder.last_traceback
    assert found is not None
    assert (found.text, found.at, found.is_last_word, found.has_survived) == (
        plain.decode(),
        99.0,
        True,
        False,
    )


def test_text_that_only_speaks_of_a_traceback_is_none() -> None:
    for line in (
        b"see: Traceback (most recent call last):",
        b"it said Fatal Python error: x",
        b"10% Traceback (most",
    ):
        assert read(line + b"\nstep 2\nValueError: no\n") is None
        found = need(PLAIN + b"\n" + line + b"\nstep 2\n")
        assert (found.text, found.is_last_word) == (PLAIN.decode(), True)


def fed(*parts: tuple[float, bytes]) -> Traceback:
    finder = TracebackFinder()
    for at, data in parts:
        finder.feed(data, at)
    assert finder.last_traceback is not None
    return finder.last_traceback


def test_the_signs_that_a_program_lived_on() -> None:
    assert not fed((1.0, PLAIN), (2.0, b"giving up\n"), (9.0, NOISE)).has_survived
    assert need(b"ERROR:root:handled\n" + PLAIN).has_survived
    assert need(b"2026-01-01 10:00:00,1 - x - ERROR - handled\n" + PLAIN).has_survived
    assert need(b"ERROR:root:" + PLAIN).has_survived
    assert not need(b"2026-01-01 10:00:00,1 - x - INFO - step\n" + PLAIN).has_survived
    for life in (b"step 2\n", b"\r 20%|##", b"step"):
        later = fed((1.0, PLAIN), (9.0, life))
        assert (later.has_survived, later.is_last_word, later.text) == (True, True, PLAIN.decode())
        assert not fed((1.0, PLAIN), (60.0, life)).is_last_word


def test_a_message_ends_with_a_pause() -> None:
    found = fed((1.0, PLAIN), (1.5, b"  a note\n"), (8.0, b"step 2\nstep 3\n"))
    assert (found.text, found.lines_after) == (PLAIN.decode() + "  a note\n", 2)
