"""
Parse the stacks that faulthandler and py-spy print, and normalize them for comparison. Pure.

    Thread 0x00007f2b6ffff640 (most recent call first):          faulthandler: main thread last
      File "/usr/lib/python3.11/threading.py", line 324 in wait

    Thread 4711 (idle): "MainThread"                              py-spy
        wait (threading.py:324)

The main thread matters. If it only waits for another thread (its innermost frame is in threading or
queue), the other threads are shown below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pdrun.launcher.diagnosis.tracebacks import is_launcher_file
from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import StackGroup

MAX_STACK_BYTES = 8 * 1024
MAX_NODE_BYTES = 64 * MAX_STACK_BYTES
"""All stacks of a node must fit into one message, as JSON with its other fields."""
_HEAD = re.compile(
    r"(?:Current thread|Thread) (?:0x[0-9a-fA-F]+|\d+)"
    r'(?: [\[(][^\])]*[\])])*(?:: "(?P<name>[^"]*)")?'
)
_FILE = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<function>.*)')
_PY_SPY_FRAME = re.compile(r"\s+(?P<function>.+) \((?P<file>[^()]*?)(?::\d+)?\)$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_WAITS = re.compile(
    r"(?:^|/)(?:threading|queue|concurrent/futures/_base|multiprocessing/[a-z]+)\.py$"
)


_COLLECTIVE_FILE = re.compile(
    r"(?:^|/)(?:torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives"
    r"|nn/functional)|torch/cuda/nccl|deepspeed/comm/\w+|horovod/torch/mpi_ops)\.py$"
)
"""Files whose functions call a communication library."""
_COLLECTIVE = re.compile(
    r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(?:monitored_)?barrier|broadcast)"
    r"(?:_\w+)?$"
)
"""Functions that are a collective in any file."""
_COMMUNICATION = re.compile(r"(?:reduce|gather|scatter|i?send|i?recv|wait)(?:_\w+)?$")
"""Functions that are one in those files only."""
MAX_COLLECTIVE_FRAMES = 6


@dataclass(frozen=True)
class ThreadStack:
    """The stack of a thread; ``frames`` as printed, innermost first."""

    frames: tuple[str, ...]
    is_main: bool = False


def parse_threads(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a dump of either tool, main thread first; empty if there are none."""
    blocks: list[tuple[str | None, list[str]]] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            blocks.append((head["name"], []))
        elif blocks and line.startswith(" "):
            blocks[-1][1].append(line.strip())
    if not blocks:
        return ()
    main = len(blocks) - 1
    for at, (name, _) in enumerate(blocks):
        if name == "MainThread":
            main = at
            break
    order = [main, *(at for at in range(len(blocks)) if at != main)]
    return tuple(
        ThreadStack(tuple(_ADDRESS.sub("0x", frame) for frame in blocks[at][1]), at == main)
        for at in order
    )


def is_program_running(text: str) -> bool:
    """
    Return whether the main thread of a dump runs the program's code.

    It does not while the interpreter finalizes. True if there are no threads in the text.
    """
    threads = parse_threads(text)
    if not threads:
        return True
    return any(
        frame.endswith("in <module>") or frame.startswith("<module> (")
        for frame in threads[0].frames
    )


def normalize_stack(text: str) -> str:
    """
    Return the part of a dump to show: equal for processes at the same place in the code.

    Empty if there are no threads in the text.
    """
    found = parse_threads(text)
    if not found:
        return ""
    own = _user_frames(found[0].frames)
    lines = list(own) or ["(no Python code)"]
    innermost = _parse_frame(lines[0])[0]
    if innermost is None or _WAITS.search(innermost):
        others = sorted({_user_frames(thread.frames) for thread in found[1:]} - {()})
        for number, frames in enumerate(others, 2):
            lines += [f"thread {number}:", *frames]
    return truncate_text("\n".join(lines))


def find_collective_call(stack: str) -> str:
    """
    Return the collective in which a normalized stack waits, such as ``all_reduce``; empty: none.

    The innermost call must be one, or a function of a communication library. A collective further
    out proves nothing: it may run work of the program.
    """
    found = ""
    frames = [_parse_frame(line) for line in stack.splitlines()]
    # the frames of native code, which py-spy shows, are below that of Python
    frames = [frame for frame in frames if frame[0] is not None and frame[0].endswith(".py")]
    for place, (file, function) in enumerate(frames[:MAX_COLLECTIVE_FRAMES]):
        is_library = _COLLECTIVE_FILE.search(file or "") is not None
        if place > 0 and not is_library:
            break
        if _COLLECTIVE.match(function) or (is_library and _COMMUNICATION.match(function)):
            found = function
        elif not is_library:
            break
    return found


def truncate_text(text: str, max_bytes: int = MAX_STACK_BYTES) -> str:
    """Return the text, truncated to ``max_bytes`` in UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 4].decode("utf-8", "ignore") + "\n..."


def group_stacks(stacks: Iterable[tuple[int, str]]) -> tuple[StackGroup, ...]:
    """
    Return groups of equal stacks from (rank, stack), the largest first.

    If there are many, each is truncated to its share of MAX_NODE_BYTES. The innermost calls are
    kept.
    """
    found: dict[str, list[int]] = {}
    for rank, stack in stacks:
        found.setdefault(stack, []).append(rank)
    order = sorted(found.items(), key=lambda item: (-len(item[1]), min(item[1])))
    share = min(MAX_STACK_BYTES, max(64, MAX_NODE_BYTES // max(1, len(order))))
    return tuple(
        StackGroup(tuple(sorted(ranks)), truncate_text(stack, share)) for stack, ranks in order
    )


def _user_frames(frames: Sequence[str]) -> tuple[str, ...]:
    """Remove the outermost frames that only started the program."""
    kept = list(frames)
    while kept and _is_launcher_frame(kept[-1]):
        kept.pop()
    return tuple(kept)


def _is_launcher_frame(frame: str) -> bool:
    file, _ = _parse_frame(frame)
    return file is not None and (
        is_launcher_file(file) or file.endswith(("fork_server.py", "runpy.py"))
    )


def _parse_frame(frame: str) -> tuple[str | None, str]:
    """Return (file, function) of a frame; without a file (None, frame)."""
    match = _FILE.match(frame) or _PY_SPY_FRAME.match(" " + frame)
    if match is None:
        return None, frame
    return match["file"], match["function"]
