"""
``python -m pdrun.launcher.function.worker_main FILE``: one worker of `pdrun.launch`.

It calls the function in FILE and writes the result or the exception to a file in the same folder.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from pdrun.launcher.function.transfer import load_call, read_call, write_failure, write_value


def main(argv: list[str]) -> int:
    """Run the call in a file; return the exit code."""
    path = Path(argv[0])
    search_path, data = read_call(path)
    # modules are found where the caller found them
    sys.path[:] = dict.fromkeys([*search_path, *sys.path])
    sys.argv = [str(path)]
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        function, args, kwargs = load_call(data)
        value = function(*args, **kwargs)
        try:
            write_value(path.parent, rank, world_size, value)
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank}, {_describe_type(value)}, cannot be pickled: {error}"
            ) from None
    except Exception as error:
        text = format_user_traceback(error)
        write_failure(path.parent, rank, world_size, error, text, 1)
        sys.stderr.write(text)
        sys.last_value = error  # as the interpreter does: `pdrun.init` leaves groups differently
        return 1
    return 0


def _describe_type(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {prefix}{kind.__qualname__}"


def format_user_traceback(error: BaseException) -> str:
    """Return the traceback as Python prints it, without the frames of this file."""
    trace = _skip_own_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    header = "Traceback (most recent call last):\n"
    # Without a frame of the user (a wrong number of arguments) Python prints no header. It is added
    # to show that this was an exception.
    if trace is None and not text.startswith((header, "  +")):
        return header + text
    return text


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
