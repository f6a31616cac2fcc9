"""
Stacks as text: what faulthandler and py-spy print, read, and made comparable between processes.
Pure.

    Thread 0x00007f2b6ffff640 (most recent call first):          faulthandler: newest thread first, the main one last
      File "/usr/lib/python3.11/threading.py", line 324 in wait

    Thread 4711 (idle): "MainThread"                              py-spy
        wait (threading.py:324)

What counts is the main thread. Where that only waits for another thread (its innermost frame is one
of threading or queue), the others are shown below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdrun.launcher.diagnosis.tracebacks import is_launcher_file
from pdrun.rendezvous.protocol.messages import StackGroup

MAX_STACK_BYTES = 8 * 1024
MAX_NODE_BYTES = 64 * MAX_STACK_BYTES
"""
Bytes of all stacks of a node: in JSON they, and what stands around them, fit into one message.
"""
_HEAD = re.compile(
    r'(?:Current thread|Thread) (?:0x[0-9a-fA-F]+|\d+)(?: [\[(][^\])]*[\])])*(?:: "(?P<name>[^"]*)")?'
)
_FILE = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<function>.*)')
_PY_SPY_FRAME = re.compile(r"\s+(?P<function>.+) \((?P<file>[^()]*?)(?::\d+)?\)$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_WAITS = re.compile(
    r"(?:^|/)(?:threading|queue|concurrent/futures/_base|multiprocessing/[a-z]+)\.py$"
)


@dataclass(frozen=True)
class ThreadStack:
    """One thread; ``frames`` innermost first, as printed."""

    frames: tuple[str, ...]
    is_main: bool = False


def parse_threads(text: str) -> tuple[ThreadStack, ...]:
    """
    Return the threads of a dump of either tool, the main one first; empty where there is none.
    """
    blocks: list[tuple[str | None, list[str]]] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            blocks.append((head["name"], []))
        elif blocks and line.startswith(" "):
            blocks[-1][1].append(line.strip())
    if not blocks:
        return ()
    named = any(name == "MainThread" for name, _ in blocks)
    main = (
        next(at for at, (name, _) in enumerate(blocks) if name == "MainThread")
        if named
        else len(blocks) - 1
    )
    order = [main, *(at for at in range(len(blocks)) if at != main)]
    return tuple(
        ThreadStack(tuple(_ADDRESS.sub("0x", frame) for frame in blocks[at][1]), at == main)
        for at in order
    )


def is_program_running(text: str) -> bool:
    """
    Whether a dump shows code of the program in its main thread: not so once only the interpreter's
    end is left.
    """
    found = parse_threads(text)
    main = found[0].frames if found else ("in <module>",)
    return any(frame.endswith("in <module>") or frame.startswith("<module> (") for frame in main)


def normalize_stack(text: str) -> str:
    """
    Return what to show of a dump: equal for processes that stand at the same place; empty where
    there is nothing.
    """
    found = parse_threads(text)
    if not found:
        return ""
    own = _user_frames(found[0].frames)
    lines = list(own) or ["(no Python code)"]
    if _parse_frame(lines[0])[0] is None or _WAITS.search(_parse_frame(lines[0])[0] or ""):
        others = sorted({_user_frames(thread.frames) for thread in found[1:]} - {()})
        for number, frames in enumerate(others, 2):
            lines += [f"thread {number}:", *frames]
    return truncate_text("\n".join(lines))


def truncate_text(text: str, max_bytes: int = MAX_STACK_BYTES) -> str:
    """Return the text, at most ``longest`` bytes of it in UTF-8."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 4].decode("utf-8", "ignore") + "\n..."


def group_stacks(stacks: Iterable[tuple[int, str]]) -> tuple[StackGroup, ...]:
    """
    Return the groups of equal stacks, the largest first, from (rank, stack).

    Of many different ones each has its share of MOST: the innermost calls, which tell places apart.
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
    """Leave out the frames that only started the program, at the bottom."""
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
    """Return (file, function) of a frame; the file is None where there is none."""
    match = _FILE.match(frame) or _PY_SPY_FRAME.match(" " + frame)
    return (match["file"], match["function"]) if match else (None, frame)
