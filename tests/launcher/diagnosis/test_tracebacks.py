"""Tracebacks as text."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pdrun.launcher.diagnosis import tracebacks as traces
from pdrun.launcher.diagnosis.tracebacks import (
    extract_user_frames,
    is_launcher_file,
    parse_exceptions,
)

PLAIN = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/train.py", line 5, in main
    raise ValueError("a\\nb")
ValueError: a
b
"""


def test_the_message_may_have_several_lines():
    (error,) = parse_exceptions(PLAIN)
    assert (error.type, error.text, error.summary) == ("ValueError", "a\nb", "ValueError: a")
    assert error.functions == ("<module>", "main")


def test_a_chain_in_order_and_names_without_module():
    text = PLAIN + "\nDuring handling of the above exception, another exception occurred:\n\n"
    text += PLAIN.replace("ValueError: a\nb", "my.own.Error")
    assert [error.summary for error in parse_exceptions(text)] == ["ValueError: a", "Error"]


def test_carets_and_notes_are_no_exception_line():
    text = PLAIN.replace("    main()\n", "    main()\n    ^^^^^^\n")
    assert [error.type for error in parse_exceptions(text)] == ["ValueError"]


def test_a_group_is_found():
    group = """  + Exception Group Traceback (most recent call last):
  |   File "/a.py", line 1, in <module>
  |     raise ExceptionGroup("several", [ValueError("one")])
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: one
    +------------------------------------
"""
    assert parse_exceptions(group)[0].summary == "ExceptionGroup: several (1 sub-exception)"


LAUNCHED = f"""Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "<frozen runpy>", line 88, in _run_code
  File "{Path(traces.__file__).with_name("function_worker.py")}", line 31, in main
    result = call()
             ^^^^^^
  File "/home/me/train.py", line 5, in main
    boom()
ValueError: boom
"""


def test_launcher_frames_are_cut_and_the_users_stay():
    assert (
        extract_user_frames(LAUNCHED)
        == """Traceback (most recent call last):
  File "/home/me/train.py", line 5, in main
    boom()
ValueError: boom
"""
    )


def test_a_traceback_of_nothing_but_launcher_frames_is_kept():
    text = LAUNCHED.replace('  File "/home/me/train.py", line 5, in main\n    boom()\n', "")
    assert extract_user_frames(text) == text


def test_frames_of_pdrun_below_the_users_stay():
    text = PLAIN.replace(
        '"/home/me/train.py", line 5, in main', '"/venv/pdrun/parallel/context.py", line 5, in init'
    )
    assert extract_user_frames(text) == text


def test_which_files_are_the_launchers():
    assert all(
        map(is_launcher_file, ("<frozen runpy>", "/usr/lib/python3.11/runpy.py", traces.__file__))
    )
    assert not any(
        map(
            is_launcher_file,
            ("/home/me/launcher/train.py", "/home/me/pdrun/train.py", "/me/runpy.py"),
        )
    )


@given(
    st.text(alphabet='Traceback (most recent call last):\n  File",in ValueError:|+ab', max_size=400)
)
def test_nothing_breaks_on_any_text(text):
    parse_exceptions(text)
    assert extract_user_frames(text).endswith("\n")
