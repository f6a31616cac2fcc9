"""
The files by which `pdrun.launch` hands a function to its workers and gets their results back.

Every file lies in one private folder (0700, files 0600) made for the call and removed after it;
only pdrun itself, as the same user, writes there. That is why pickle may be read here, and nowhere
else in pdrun: nothing comes from outside.

A file is one line of JSON, readable by anything, then pickled bytes::

    train.call      {"path": ["/home/me/project", ...]}       the function and its arguments
    result_3.bin    {"ok": true, "world": 4}                  what rank 3 returned
    result_3.bin    {"ok": false, "world": 4, "traceback": "...", "code": 1}
                                                              what it raised; no bytes when that cannot be pickled
"""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class Result:
    """What one rank left behind."""

    rank: int
    ok: bool
    world: int
    traceback: str
    """As the worker printed it, without frames of pdrun; empty when it returned."""
    code: int
    data: bytes
    """The pickled value or exception."""

    def value(self) -> Any:
        """
        Return what the function returned; PdrunError when it cannot be rebuilt in this process.
        """
        try:
            return pickle.loads(self.data)  # noqa: S301 - written by our own worker in our private folder
        except Exception as error:
            what = f"the result of rank {self.rank} cannot be read back: {error!r}"
            raise PdrunError(what, where="pdrun.launch") from error

    def exception(self) -> BaseException | None:
        """Return the exception itself when it came through pickling, else None."""
        try:
            found = pickle.loads(self.data) if self.data else None  # noqa: S301 - as above
        except (
            Exception
        ):  # an exception class whose arguments do not rebuild it: its text is in the traceback
            return None
        return found if isinstance(found, BaseException) else None


def write_call(
    path: Path,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    search: Sequence[str],
) -> None:
    """
    Write a call; functions of ``__main__``, lambdas and closures travel by value, others by name.

    Raises:
        UsageError: the function or an argument cannot be pickled; says which and why.
    """
    for what, value in (("the function", function), ("the arguments", (tuple(args), dict(kwargs)))):
        try:
            _dumps(value)
        except Exception as error:
            raise UsageError(
                f"{what} cannot be pickled: {error}",
                where="pdrun.launch",
                hint="open files, locks and processes inside the function instead",
            ) from error
    _write(path, {"path": list(search)}, _dumps((function, tuple(args), dict(kwargs))))


def read_call(path: Path) -> tuple[list[str], bytes]:
    """
    Return the caller's module search path and the pickled call, to be loaded once the path is in
    place.
    """
    header, data = _read(path)
    return list(header["path"]), data


def load_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """
    Rebuild the function and its arguments.

    What travelled by value has its place in a module ``__main__`` of its own afterwards, as it had
    in the caller's: pickle and torch.compile look things up there by name.
    """
    loader = _Loader(io.BytesIO(data))
    function, args, kwargs = loader.load()
    if loader.made:
        sys.modules["__main__"] = _main_of(loader.made)
    return function, args, kwargs


class _Loader(pickle.Unpickler):
    """Notes the functions and classes that cloudpickle makes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.made: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`; the data was written by `write_call` in our private folder."""
        found = super().find_class(module, name)
        if not module.startswith("cloudpickle") or name not in (
            "_make_function",
            "_make_skeleton_class",
        ):
            return found

        @functools.wraps(found)
        def make(*args: Any) -> Any:
            self.made.append(found(*args))
            return self.made[-1]

        return make


def _main_of(made: Sequence[Any]) -> ModuleType:
    """
    Return a module with the caller's ``__main__``, as far as it came; whence it was started stays
    as it is.
    """
    before = sys.modules["__main__"]
    main = ModuleType("__main__")
    for one in made:
        if getattr(one, "__module__", None) == "__main__":
            vars(main).update(getattr(one, "__globals__", {}))
            if one.__qualname__ == one.__name__ and one.__name__.isidentifier():
                setattr(main, one.__name__, one)
    for name in (
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__file__",
        "__cached__",
    ):
        vars(main)[name] = vars(before).get(name)
    return main


def write_value(folder: Path, rank: int, world: int, value: Any) -> None:
    """Write what a rank returned; raises whatever pickling it raises."""
    _write(folder / f"result_{rank}.bin", {"ok": True, "world": world}, _dumps(value))


def write_failure(
    folder: Path, rank: int, world: int, error: BaseException, traceback: str, code: int
) -> None:
    """Write what a rank raised; never raises because of the exception's own contents."""
    try:
        data = _dumps(error)
    except Exception:  # the traceback tells the story, the object stays behind
        data = b""
    _write(
        folder / f"result_{rank}.bin",
        {"ok": False, "world": world, "traceback": traceback, "code": code},
        data,
    )


def read_results(folder: Path) -> list[Result]:
    """Return what there is, in rank order; values are not rebuilt yet."""
    results = []
    for path in folder.glob("result_*.bin"):
        header, data = _read(path)
        rank = int(path.stem.partition("_")[2])
        told = header.get("traceback", ""), header.get("code", 0)
        results.append(Result(rank, header["ok"], header["world"], *told, data))
    return sorted(results, key=lambda result: result.rank)


def _dumps(value: Any) -> bytes:
    """
    Pickle by cloudpickle, but keep the file names of functions: a worker's traceback then shows the
    user's lines.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap(
            {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
        )

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    import cloudpickle

    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    anonymous = [isinstance(part, str) and part == "<dynamic-code>" for part in parts]
    return make, tuple(
        code.co_filename if hidden else part for hidden, part in zip(anonymous, parts, strict=True)
    )


def _write(path: Path, header: Mapping[str, Any], data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(header).encode("ascii") + b"\n" + data)
    part.replace(path)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    line, _, data = path.read_bytes().partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    return header, data
