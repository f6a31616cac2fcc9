"""
What an import depended on: which variables Python looked up while it ran, and the files that it
came from.

With this a process that has imported torch knows later whether the same import would still give the
same: a variable that was looked up has another value now, a module's file was changed, or another
one would now be found first. What compiled code reads by ``getenv`` is not seen here; its names
stand in `importtime.FROZEN`.

Loaded by path in the workers' interpreter: standard library only.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

_PATH_SUFFIXES = (".pth", ".dist-info", ".egg-info", ".egg-link")
"""
Entries of a folder of modules that count whatever they are called: paths to more of them, and
plug-ins of torch.
"""


_WALK_MODULES = (
    "_collections_abc",
    "collections.abc",
    "os",
    __name__,
)  # the first two are one module, and its two names
"""Modules that stand between a walk through os.environ and whoever walks."""
_KNOWN_WALKERS = ("tqdm.utils",)
"""
Modules that go through the whole environment for names of their own, which `importtime.FROZEN` has:
almost every installation has tqdm, which torch imports.
"""


class EnvironLookups:
    """Notes the names that are looked up in os.environ inside a ``with`` block."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Those that something asked for by name."""
        self.has_unknown_walk = False
        """Whether something went through the whole environment, whose names are not known."""
        self._kind: Any = type(os.environ)
        self._walked: dict[int, Any] = {}
        """
        The very objects that walks have given: whoever asks for the value of one goes on with a
        walk.
        """

    def __enter__(self) -> EnvironLookups:
        get, walk = self._real = self._kind.__getitem__, self._kind.__iter__

        def __getitem__(mapping: Any, key: Any) -> Any:
            if id(key) not in self._walked:
                self.names.add(os.fsdecode(key) if isinstance(key, (str, bytes)) else "")
            return get(mapping, key)

        def __iter__(mapping: Any) -> Any:
            self.has_unknown_walk = self.has_unknown_walk or _walking_module() not in _KNOWN_WALKERS
            for key in walk(mapping):
                self._walked[id(key)] = key
                yield key

        self._kind.__getitem__ = __getitem__
        self._kind.__iter__ = __iter__
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kind.__getitem__, self._kind.__iter__ = self._real
        self._walked.clear()


def _walking_module() -> str:
    """Return the name of the module that goes through the environment."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _WALK_MODULES:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


FileStamp = tuple[int, int, int]


class ImportedFiles:
    """
    The files of everything that is imported or mapped now, and what stands in the folders of
    ``sys.path``.
    """

    def __init__(self) -> None:
        self._names = {name.partition(".")[0] for name in sys.modules} | {
            "sitecustomize",
            "usercustomize",
        }
        self._stamps = {
            path: _stamp_file(path)
            for path in sorted({*_module_files(), *_mapped_files(), *_interpreter_files()})
        }
        self._folders = {
            path: (_stamp_file(path), self._list_entries(path))
            for path in map(os.path.abspath, sys.path)
        }

    def find_changed(self) -> str:
        """Return the first path that is not what it was, or the empty string."""
        for path, stamp in self._stamps.items():
            if _stamp_file(path) != stamp:
                return path
        for path, (stamp, entries) in self._folders.items():
            now = _stamp_file(path)
            if now != stamp:
                found = self._list_entries(path)
                if found != entries:
                    return path
                self._folders[path] = now, found  # something else came or went there
        return ""

    def _list_entries(self, folder: str) -> frozenset[str]:
        """What stands in a folder and could change what the imports would find."""
        try:
            names = os.listdir(folder)
        except OSError:
            return frozenset()
        return frozenset(
            name
            for name in names
            if name.partition(".")[0] in self._names or name.endswith(_PATH_SUFFIXES)
        )


def _stamp_file(path: str) -> FileStamp:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _module_files() -> set[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {os.path.abspath(file) for file in files if isinstance(file, str)}


def _mapped_files() -> set[str]:
    """Files that are mapped: the interpreter, shared libraries."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        words = (line.split(maxsplit=5) for line in file)
        return {
            word[5].rstrip("\n") for word in words if len(word) == 6 and word[5].startswith("/")
        }


def _interpreter_files() -> set[str]:
    """
    What the interpreter reads before any module: the virtual environment, files that lengthen
    sys.path.
    """
    found = {os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")}
    for folder in sys.path:
        try:
            found |= {
                os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")
            }
        except OSError:
            continue
    return found
