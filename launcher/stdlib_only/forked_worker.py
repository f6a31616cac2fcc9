"""
The worker's side of a fork: make this process what ``python SCRIPT`` would have become.

The order matters: identity (session, descriptors, folder, CPUs) before any thread, the environment
before its readers, random state and threads before the program. Everything that exec would have
renewed is renewed here. docs/starting.md lists what cannot be renewed (hash seed, address layout,
/proc/PID/environ, frames below the program's own).

Loaded by path in the fork server's interpreter, which may have no pdrun. Uses the standard library,
and torch if it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import re
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PR_SET_MM = 35
PR_SET_MM_ARG_END = 9
STACKS_SIGNAL = 51
"""As in `pdrun.elastic`, which this interpreter may not have."""


class ForkedProgram:
    """What a worker runs: code and the namespace of ``__main__``, or the name of a module."""

    __slots__ = ("code", "module", "namespace")

    def __init__(
        self, code: types.CodeType | None, space: dict[str, Any], module: str = ""
    ) -> None:
        self.code = code
        self.namespace = space
        self.module = module

    def exec_arguments(self) -> list[Any]:
        """Return the arguments of exec, or only the name of a module."""
        if self.code is None:
            return [self.module]
        return [self.code, self.namespace]


def replace_environment(wanted: Mapping[bytes, bytes]) -> None:
    """Replace the environment of Python and of C."""
    os.environb.clear()
    ctypes.CDLL(None).clearenv()
    os.environb.update(wanted)


def find_argument_memory() -> tuple[int, int, int, int]:
    """Return the addresses of this process's command line and environment: start, end of each."""
    with open("/proc/self/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    start, end, first, last = (int(words[number - 3]) for number in (48, 49, 50, 51))
    return start, end, first, last


def set_command_line(argv: list[bytes], marker: bytes, *, keep_room: bool = False) -> None:
    """
    Write ``argv`` to /proc/PID/cmdline, and the marker to /proc/PID/environ.

    ``keep_room``: pad with zeros instead of moving the end, so that processes forked from this one
    have the same room.
    """
    start, end, first, last = find_argument_memory()
    text = b"".join(word + b"\0" for word in argv)
    if 0 < len(text) <= end - start:
        ctypes.memmove(start, text + bytes(end - start - len(text)), end - start)
        if not keep_room:
            ctypes.CDLL(None).prctl(
                PR_SET_MM, PR_SET_MM_ARG_END, ctypes.c_ulong(start + len(text)), 0, 0
            )
    block = ctypes.string_at(first, last - first)
    name, _, value = marker.partition(b"=")
    at = name and re.search(rb"(?:^|\0)" + re.escape(name) + rb"=([^\0]*)", block)
    if at and len(at[1]) == len(value):
        ctypes.memmove(first + at.start(1), value, len(value))


def reopen_streams() -> None:
    """Create sys.stdin, stdout and stderr on descriptors 0, 1, 2 as a new interpreter does."""
    old = sys.stdout, sys.stderr
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: Any = getattr(sys, f"__{name}__")
        try:
            stream: io.TextIOWrapper | None = _open_stream(
                number, f"<{name}>", before.encoding, before.errors, unbuffered
            )
        except OSError:
            stream = None  # the descriptor is closed, as it would be in an executed process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    logging = sys.modules.get("logging")
    for reference in getattr(logging, "_handlerList", ()):
        handler = reference()
        if getattr(handler, "stream", None) in old:  # created during the imports
            handler.stream = sys.stdout if handler.stream is old[0] else sys.stderr


def _open_stream(
    number: int, name: str, encoding: str, errors: str | None, unbuffered: bool
) -> io.TextIOWrapper:
    writes = number > 0
    plain = unbuffered and writes
    buffer: Any = open(  # noqa: SIM115
        number, "wb" if writes else "rb", buffering=0 if plain else -1, closefd=False
    )
    raw = buffer if plain else buffer.raw
    raw.name = name
    stream = io.TextIOWrapper(
        buffer,
        encoding,
        "backslashreplace" if number == 2 else errors,
        newline="\n",
        line_buffering=not unbuffered and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = "w" if writes else "r"  # type: ignore[misc]
    return stream


def renew_process_state() -> None:
    """
    Renew what a new interpreter, or the import of a module, initialises for each process.

    Random states, the key of multiprocessing, logging's start time, caches.
    """
    modules: dict[str, Any] = dict(sys.modules)
    torch = modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed(None)
    process = modules.get("multiprocessing.process")
    if process is not None:
        process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))
        process.ORIGINAL_DIR = os.path.abspath(os.getcwd())
    logging = modules.get("logging")
    if logging is not None:
        logging._startTime = (
            time.time() if isinstance(logging._startTime, float) else time.time_ns()
        )
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None
    sys.path_importer_cache.clear()


def set_thread_counts(environ: Mapping[str, str]) -> None:
    """Set the thread counts from the environment; the imports were made with one thread."""
    most = len(os.sched_getaffinity(0))  # MKL and OpenBLAS use at most the number of CPUs
    own = int(environ.get("OMP_NUM_THREADS") or most)
    torch = sys.modules.get("torch")
    if torch is not None:
        mkl = torch.backends.mkl.is_available()
        wanted = min(int(environ.get("MKL_NUM_THREADS") or own), most) if mkl else own
        if wanted != 1:
            torch.set_num_threads(wanted)
    blas = min(
        int(environ.get("OPENBLAS_NUM_THREADS") or environ.get("GOTO_NUM_THREADS") or own), most
    )
    if blas != 1 and "numpy" in sys.modules:
        set_openblas_threads(blas)


def set_openblas_threads(count: int) -> None:
    """
    Set the threads of every OpenBLAS that is loaded.

    It creates them now, as it does in an executed process.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "openblas" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for name in (
            "scipy_openblas_set_num_threads64_",
            "scipy_openblas_set_num_threads",
            "openblas_set_num_threads64_",
            "openblas_set_num_threads",
        ):
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def patch_destroy_process_group() -> None:
    """
    Let ``destroy_process_group`` release the GIL for a moment first. Called in the fork server.

    torch joins the thread of a group while it has the GIL. That thread may need the GIL to release
    the last collective's tensor. A script that ends within 5 ms (the switch interval) then hangs,
    forked or executed. Workers with torch._dynamo imported are that fast.
    """
    home: Any = sys.modules.get("torch.distributed.distributed_c10d")
    original = getattr(home, "destroy_process_group", None)
    if original is None:
        return

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.002)
        return original(*args, **kwargs)

    home.destroy_process_group = destroy_process_group
    face: Any = sys.modules["torch.distributed"]
    face.destroy_process_group = destroy_process_group


def register_stacks(agent: str) -> None:
    """
    Let STACKS_SIGNAL write this worker's stacks to a file next to the agent's socket.

    `pdrun.elastic` does the same.
    """
    import faulthandler
    import fcntl

    if not agent:
        return
    try:
        path = f"{agent.rpartition('/')[0]}/{os.getpid()}.stacks"
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            high = fcntl.fcntl(
                low, fcntl.F_DUPFD_CLOEXEC, 200
            )  # a script may rely on 3, 4, ... being free
        finally:
            os.close(low)
        faulthandler.register(STACKS_SIGNAL, file=high, all_threads=True)
    except (OSError, ValueError):
        pass  # stacks are then read from outside, as far as possible


def prepare_program(argv: list[str]) -> ForkedProgram | None:
    """
    Set up ``sys`` and ``__main__`` for a command line as the interpreter does; return what to run.

    Returns:
        None if a new interpreter must run it: an error in the source, which only that reports
        alike.
    """
    sys.orig_argv = list(argv)
    words = argv[1:]
    if words[0] == "-P":
        words = words[1:]
    main = types.ModuleType("__main__")
    space = main.__dict__
    space.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main  # a spawned process pickles objects by this name
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        return ForkedProgram(None, space, words[1])
    sys.argv = words
    path = os.path.join(os.getcwd(), words[0])
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    from importlib.machinery import SourceFileLoader

    space.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    try:
        with open(path, "rb") as file:
            source = file.read()
        return ForkedProgram(compile(source, path, "exec", dont_inherit=True), space)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def hide_own_frame() -> None:
    """Hide the frame of the fork server in the report of the exception that ends the program."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        sys.excepthook = hook
        own = trace.tb_next if trace is not None else None
        sys.last_traceback = own
        error.__traceback__ = own
        hook(kind, error, own)

    sys.excepthook = excepthook
