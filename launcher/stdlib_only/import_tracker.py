"""
What an import depended on: the variables that Python looked up, and the files that it loaded.

A warm process uses it to find out whether the same import would still have the same result. It
would not if a variable has another value, a module's file was changed, or another file would be
found first. Variables that compiled code reads with ``getenv`` are not seen here. They are listed
in `import_env.IMPORT_VARIABLES`.

Loaded by path in the workers' interpreter. Standard library only.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

_PATH_SUFFIXES = (".pth", ".dist-info", ".egg-info", ".egg-link")
"""Entries of a module folder that always matter: files that extend sys.path, plug-ins of torch."""

_WALK_MODULES = ("_collections_abc", "collections.abc", "os", __name__)
"""
Modules whose frames are between an iteration over os.environ and the code that iterates. The first
two are names of one module.
"""
_KNOWN_WALKERS = ("tqdm.utils",)
"""
Modules that iterate over the environment for known names, which are in `IMPORT_VARIABLES`. torch
imports tqdm if it is installed, which is nearly always.
"""


class EnvironLookups:
    """Records the names that are looked up in os.environ inside a ``with`` block."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Names that were looked up by name."""
        self.has_unknown_walk = False
        """Whether unknown code iterated over the whole environment."""
        self._kind: Any = type(os.environ)
        self._walked: dict[int, Any] = {}
        """
        Key objects that an iteration has returned, by id. A lookup with such an object belongs to
        the iteration.
        """

    def __enter__(self) -> EnvironLookups:
        get = self._kind.__getitem__
        walk = self._kind.__iter__
        self._real = (get, walk)

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
    """Return the name of the module that iterates over the environment."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _WALK_MODULES:
        frame = frame.f_back
    if frame is None:
        return ""
    return str(frame.f_globals.get("__name__"))


FileStamp = tuple[int, int, int]


class ImportedFiles:
    """The files that are imported or mapped now, and the entries of the folders in sys.path."""

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
        """Return the first path that has changed, or the empty string."""
        for path, stamp in self._stamps.items():
            if _stamp_file(path) != stamp:
                return path
        for path, (stamp, entries) in self._folders.items():
            now = _stamp_file(path)
            if now != stamp:
                found = self._list_entries(path)
                if found != entries:
                    return path
                self._folders[path] = now, found  # an entry that does not matter has changed
        return ""

    def _list_entries(self, folder: str) -> frozenset[str]:
        """Return the entries of a folder that could change what the imports find."""
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
    """Return the mapped files: the interpreter and shared libraries."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = set()
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.add(fields[5].rstrip("\n"))
        return paths


def _interpreter_files() -> set[str]:
    """
    Return what the interpreter reads before any module: pyvenv.cfg, files that extend sys.path.
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
