"""
What a program's text tells about how to start it: does it import torch, will it want an optimizer,
does it set variables too late for a fork. Nothing is imported or run; the program's own modules
beside it are read too.

Limits: text, not truth. An import by a computed name is not seen (the workers are then executed, or
import it themselves); at most FILES files and BYTES bytes are read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pdrun.launcher.common import files
from pdrun.launcher.stdlib_only.import_env import late_assignment

LOOK = 1 << 20
"""Bytes of a file that are looked at."""
FILES = 64
BYTES = 4 << 20
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t(]+([\w, \t]+)|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
_TORCH = frozenset(
    (b"torch", b"lightning", b"pytorch_lightning", b"transformers", b"accelerate", b"deepspeed")
)
_RUNTIME = re.compile(rb"\bpdrun\.init\b|from[ \t]+pdrun[ \t]+import")
_OPTIMIZER = re.compile(
    rb"optim|Adam|SGD|torch\.compile|torch\._dynamo|lightning|transformers|accelerate|deepspeed|Trainer"
)


@dataclass(frozen=True)
class Told:
    """What a program's text says."""

    torch: bool = False
    optimizes: bool = False
    late: str = ""
    """``train.py:3 sets OMP_NUM_THREADS``, or empty."""


@lru_cache(maxsize=2)  # a guess has asked before the plan does (`ahead`)
def told(path: Path, text: bytes) -> Told:
    """Read a program and its own modules."""
    torch = False
    optimizes = False
    late = ""
    for file, body in _own(path, text):
        names = {name.partition(b".")[0] for name in _names(body)}
        torch = torch or bool(names & _TORCH) or (b"pdrun" in names and bool(_RUNTIME.search(body)))
        optimizes = optimizes or bool(_OPTIMIZER.search(body))
        found = late_assignment(body.decode("utf-8", "replace")) if not late else None
        if found:
            late = f"{file.name}:{found[0]} sets {found[1]}"
    return Told(torch, optimizes, late)


def _names(text: bytes) -> Iterator[bytes]:
    """The modules that a text imports, as written."""
    for match in _IMPORT.finditer(text):
        if match[3] is not None:
            yield from (part.strip().partition(b" ")[0] for part in match[3].split(b","))
        else:
            yield match[1]
            yield from (
                match[1].rstrip(b".") + b"." + part.strip().partition(b" ")[0]
                for part in match[2].split(b",")
            )


def _own(path: Path, text: bytes) -> Iterator[tuple[Path, bytes]]:
    """A program and those of its modules that lie beside it."""
    todo = deque([(path, text)])
    seen = {path}
    total = 0
    while todo and total < BYTES:
        file, body = todo.popleft()
        yield file, body
        total += len(body)
        for name in _names(body):
            for found in _files(path.parent, file.parent, name):
                if found not in seen and len(seen) < FILES:
                    seen.add(found)
                    try:
                        with found.open("rb") as source:
                            todo.append((found, source.read(LOOK)))
                    except OSError:
                        continue


def _files(top: Path, here: Path, name: bytes) -> Iterator[Path]:
    text = name.decode("ascii", "replace")
    dots = len(text) - len(text.lstrip("."))
    base = here if dots else top
    for _ in range(dots - 1):
        base = base.parent
    parts = [part for part in text.split(".") if part]
    if parts:
        stem = base.joinpath(*parts)
        yield from filter(files.is_file, (stem.with_suffix(".py"), stem / "__init__.py"))
