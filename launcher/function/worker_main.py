"""
``python -m pdrun.launcher.function.worker_main FILE``: one worker of `pdrun.launch`.

It calls the function in FILE and leaves what was returned or raised beside it.
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
    search, data = read_call(path)
    sys.path[:] = dict.fromkeys(
        [*search, *sys.path]
    )  # the caller's modules are found as the caller found them
    sys.argv = [str(path)]
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    try:
        function, args, kwargs = load_call(data)
        value = function(*args, **kwargs)
        try:
            write_value(path.parent, rank, world, value)
        except Exception as error:
            raise TypeError(
                f"the result of rank {rank}, {_named(value)}, cannot be pickled: {error}"
            ) from None
    except Exception as error:
        text = user_traceback(error)
        write_failure(path.parent, rank, world, error, text, 1)
        sys.stderr.write(text)
        return 1
    return 0


def _named(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of type {prefix}{kind.__qualname__}"


def user_traceback(error: BaseException) -> str:
    """
    Return the traceback as Python prints it, without the frames of this file: the user's function
    is the first.
    """
    trace = _skip_own(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    head = "Traceback (most recent call last):\n"
    # where no frame is the user's (a wrong number of arguments) the header still tells that it was
    # an exception
    if trace is None and not text.startswith((head, "  +")):
        return head + text
    return text


def _skip_own(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
