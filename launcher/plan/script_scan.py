"""
Scan a program's text: does it import torch, use an optimizer, or set variables too late for a fork?
Nothing is imported or run. The program's own modules in its folder are scanned too.

Limits: an import by a computed name is not found. Then the workers are started by exec, or they
import the module themselves. At most MAX_FILES files and MAX_TOTAL_BYTES bytes are read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pdrun.launcher.common import files
from pdrun.launcher.stdlib_only.import_env import find_late_assignment
from pdrun.launcher.stdlib_only.late_variables import is_late_variable
from pdrun.quick_dataclass import dataclass

MAX_READ_BYTES = 1 << 20
"""Number of bytes of a file that are scanned."""
MAX_FILES = 64
MAX_TOTAL_BYTES = 4 << 20
_IMPORT_PATTERN = re.compile(
    rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t(]+([\w, \t]+)|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
_TORCH_PACKAGES = frozenset(
    (b"torch", b"lightning", b"pytorch_lightning", b"transformers", b"accelerate", b"deepspeed")
)
_RUNTIME_PATTERN = re.compile(rb"\bpdrun\.init\b|from[ \t]+pdrun[ \t]+import")
_OPTIMIZER_PATTERN = re.compile(
    rb"optim|Adam|SGD|torch\.compile|torch\._dynamo"
    rb"|lightning|transformers|accelerate|deepspeed|Trainer"
)
_PORT_PATTERN = re.compile(
    rb"^[^#\n]*(?:init_method|init_process_group)[^#\n]{0,80}"
    rb"tcp://(?:localhost|127\.0\.0\.1):([1-9][0-9]{1,4})\b"
    rb"|^[^#\n]*environ\[[\"']MASTER_PORT[\"']\][ \t]*=[ \t]*(?:str\()?[\"']?([1-9][0-9]{1,4})\b",
    re.MULTILINE,
)
"""Where a script writes the port at which its workers meet on one machine."""


@dataclass(frozen=True)
class ScriptInfo:
    """Result of a scan of a program's text."""

    imports_torch: bool = False
    uses_optimizer: bool = False
    late_variable: str = ""
    """``train.py:3 sets OMP_NUM_THREADS``, or empty."""
    store_port: int = 0
    """Port of torch's store that the program's file contains as a number; 0: none."""
    store_source: str = ""
    """``train.py:12``, where it is."""


@lru_cache(maxsize=2)  # prestart scans the program before the plan does
def scan_script(path: Path, text: bytes) -> ScriptInfo:
    """Scan a program and its own modules."""
    imports_torch = False
    uses_optimizer = False
    late = ""
    for file, body in _local_modules(path, text):
        names = {name.partition(b".")[0] for name in _imported_names(body)}
        if names & _TORCH_PACKAGES or (b"pdrun" in names and _RUNTIME_PATTERN.search(body)):
            imports_torch = True
        if _OPTIMIZER_PATTERN.search(body):
            uses_optimizer = True
        if not late:
            text_of_file = body.decode("utf-8", "replace")
            assignment = find_late_assignment(text_of_file, is_late_variable)
            if assignment:
                line, name = assignment
                late = f"{file.name}:{line} sets {name}"
    port, line = _find_store_port(text) if imports_torch else (0, 0)
    source = f"{path.name}:{line}" if port else ""
    return ScriptInfo(imports_torch, uses_optimizer, late, port, source)


def _find_store_port(text: bytes) -> tuple[int, int]:
    """Return the first port at which the workers of a script meet, and its line; 0: none."""
    match = _PORT_PATTERN.search(text)
    if match is None:
        return 0, 0
    port = int(match[1] or match[2])
    line = text.count(b"\n", 0, match.start(1 if match[1] else 2)) + 1
    return (port, line) if port <= 65535 else (0, 0)


def _imported_names(text: bytes) -> Iterator[bytes]:
    """Yield the names of the modules that a text imports, as written."""
    for match in _IMPORT_PATTERN.finditer(text):
        if match[3] is not None:
            yield from (part.strip().partition(b" ")[0] for part in match[3].split(b","))
        else:
            yield match[1]
            yield from (
                match[1].rstrip(b".") + b"." + part.strip().partition(b" ")[0]
                for part in match[2].split(b",")
            )


def _local_modules(path: Path, text: bytes) -> Iterator[tuple[Path, bytes]]:
    """Yield path and text of a program and of its modules in the same folder."""
    todo = deque([(path, text)])
    seen = {path}
    total = 0
    while todo and total < MAX_TOTAL_BYTES:
        file, body = todo.popleft()
        yield file, body
        total += len(body)
        for name in _imported_names(body):
            for found in _module_files(path.parent, file.parent, name):
                if found not in seen and len(seen) < MAX_FILES:
                    seen.add(found)
                    try:
                        with found.open("rb") as source:
                            todo.append((found, source.read(MAX_READ_BYTES)))
                    except OSError:
                        continue


def _module_files(top: Path, here: Path, name: bytes) -> Iterator[Path]:
    text = name.decode("ascii", "replace")
    dots = len(text) - len(text.lstrip("."))
    base = here if dots else top
    for _ in range(dots - 1):
        base = base.parent
    parts = [part for part in text.split(".") if part]
    if parts:
        stem = base.joinpath(*parts)
        yield from filter(files.is_file, (stem.with_suffix(".py"), stem / "__init__.py"))
