"""
Files that carry a function from `pdrun.launch` to its workers, and their results back.

All files are in one private folder (0700, files 0600), which is made for the call and removed after
it. Only pdrun, as the same user, writes there. Therefore pickle may be read here: no data is from
outside. No other module of pdrun reads pickle.

A file is one line of JSON, followed by pickled bytes::

    train.call      {"path": ["/home/me/project", ...]}       the function and its arguments
    result_3.bin    {"ok": true, "world": 4}                  return value of rank 3
    result_3.bin    {"ok": false, "world": 4, "traceback": "...", "code": 1}
                                      exception of rank 3; no bytes if it cannot be pickled
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from pdrun.errors import PdrunError, UsageError

CLOUDPICKLE_FACTORIES = ("_make_function", "_make_skeleton_class")
"""Functions of cloudpickle that create what was pickled by value."""


@dataclass(frozen=True)
class WorkerResult:
    """The result of one rank."""

    rank: int
    is_ok: bool
    world_size: int
    traceback: str
    """As the worker printed it, without frames of pdrun; empty if the function returned."""
    code: int
    data: bytes
    """The pickled value or exception."""

    def load_value(self) -> Any:
        """Return the function's return value. Raises PdrunError if it cannot be unpickled."""
        try:
            # written by our own worker in our private folder
            return pickle.loads(self.data)  # noqa: S301
        except Exception as error:
            what = f"the result of rank {self.rank} cannot be unpickled: {error!r}"
            raise PdrunError(what, where="pdrun.launch") from error

    def load_exception(self) -> BaseException | None:
        """Return the exception; None if it cannot be unpickled."""
        try:
            found = pickle.loads(self.data) if self.data else None  # noqa: S301 - as above
        except Exception:
            # a class that its arguments do not rebuild; the traceback contains its text
            return None
        return found if isinstance(found, BaseException) else None


def write_call(
    path: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    search_path: Sequence[str],
) -> None:
    """
    Write a call.

    Functions of ``__main__``, lambdas and closures are pickled by value, others by name.

    Raises:
        UsageError: the function or an argument cannot be pickled; names it and the reason.
    """
    for what, value in (("the function", function), ("the arguments", (tuple(args), dict(kwargs)))):
        try:
            _pickle_value(value)
        except Exception as error:
            raise UsageError(
                f"{what} cannot be pickled: {error}",
                where="pdrun.launch",
                hint="open files, locks and processes inside the function instead",
            ) from error
    data = _pickle_value((function, tuple(args), dict(kwargs)))
    _write_file(path, {"path": list(search_path)}, data)


def read_call(path: Path) -> tuple[list[str], bytes]:
    """
    Return the caller's sys.path and the pickled call.

    The call must be loaded after sys.path is set.
    """
    header, data = _read_file(path)
    return list(header["path"]), data


def load_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """
    Return the function and its arguments.

    Objects pickled by value are put into a new module ``__main__``, as they were in the caller's:
    pickle and torch.compile look them up there by name.
    """
    unpickler = _CallUnpickler(io.BytesIO(data))
    function, args, kwargs = unpickler.load()
    if unpickler.created:
        sys.modules["__main__"] = _rebuild_main(unpickler.created)
    return function, args, kwargs


class _CallUnpickler(pickle.Unpickler):
    """Records the functions and classes that cloudpickle creates."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.created: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`; the data was written by `write_call` in our private folder."""
        found = super().find_class(module, name)
        if not module.startswith("cloudpickle") or name not in CLOUDPICKLE_FACTORIES:
            return found

        @functools.wraps(found)
        def create(*args: Any) -> Any:
            self.created.append(found(*args))
            return self.created[-1]

        return create


def _rebuild_main(created: Sequence[Any]) -> ModuleType:
    """Return a module ``__main__`` with these functions and classes and this process's origin."""
    own_main = sys.modules["__main__"]
    main = ModuleType("__main__")
    for item in created:
        if getattr(item, "__module__", None) == "__main__":
            vars(main).update(getattr(item, "__globals__", {}))
            if item.__qualname__ == item.__name__ and item.__name__.isidentifier():
                setattr(main, item.__name__, item)
    for name in (
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
    ):
        vars(main)[name] = vars(own_main).get(name)
    return main


def write_value(folder: Path, rank: int, world_size: int, value: Any) -> None:
    """Write the return value of a rank. Raises any error of pickling it."""
    data = _pickle_value(value)
    _write_file(folder / f"result_{rank}.bin", {"ok": True, "world": world_size}, data)


def write_failure(
    folder: Path, rank: int, world_size: int, error: BaseException, traceback: str, code: int
) -> None:
    """Write the exception of a rank. An exception that cannot be pickled is left out."""
    try:
        data = _pickle_value(error)
    except Exception:
        data = b""
    header = {"ok": False, "world": world_size, "traceback": traceback, "code": code}
    _write_file(folder / f"result_{rank}.bin", header, data)


def read_results(folder: Path) -> list[WorkerResult]:
    """Return the results in rank order, without unpickling the values."""
    results = []
    for path in folder.glob("result_*.bin"):
        header, data = _read_file(path)
        results.append(
            WorkerResult(
                rank=int(path.stem.partition("_")[2]),
                is_ok=header["ok"],
                world_size=header["world"],
                traceback=header.get("traceback", ""),
                code=header.get("code", 0),
                data=data,
            )
        )
    return sorted(results, key=lambda result: result.rank)


def _pickle_value(value: Any) -> bytes:
    """
    Pickle with cloudpickle.

    The file names of functions are kept, so that a worker's traceback shows the user's lines.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap(
            {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
        )

        def reducer_override(self, value: Any) -> Any:
            """Pickle modules of any class by name."""
            if isinstance(value, ModuleType) and type(value) is not ModuleType:
                found = _reduce_module(value)
                if found is not None:
                    return found
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_module(module: ModuleType) -> tuple[Any, ...] | None:
    """
    Return how a worker finds a module whose class is a subclass of ModuleType; None if it cannot.

    cloudpickle pickles only plain modules by name. torch's configurations, and packages that import
    their parts on first use, replace the class.
    """
    names = [module.__name__, *(name for name, its in [*sys.modules.items()] if its is module)]
    for name in names:
        if sys.modules.get(name) is module:
            return importlib.import_module, (name,)
    parent, _, last = module.__name__.rpartition(".")
    if getattr(sys.modules.get(parent), last, None) is module:
        return getattr, (sys.modules[parent], last)
    return None


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    import cloudpickle

    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    named = []
    for part in parts:
        is_hidden = isinstance(part, str) and part == "<dynamic-code>"
        named.append(code.co_filename if is_hidden else part)
    return make, tuple(named)


def _write_file(path: Path, header: Mapping[str, Any], data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(header).encode("ascii") + b"\n" + data)
    part.replace(path)


def _read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    line, _, data = path.read_bytes().partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    return header, data
