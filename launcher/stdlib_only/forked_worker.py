"""
The child's side of a fork from the starter: make this process what ``python SCRIPT`` would have
become.

Order matters: who it is (session, descriptors, folder, CPUs) before any thread, the environment
before whatever reads it, random state and threads before the program. What exec would have made
anew is made anew here; what cannot be is listed in docs/starting.md (hash seed, address layout,
/proc/PID/environ, frames below the program's own).

Loaded by path in the starter's interpreter, which may have no pdrun: standard library, and torch as
it is there.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import io
import os
import re
import sys
import time
import types
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

PR_SET_MM = 35
PR_SET_MM_ARG_END = 9
STACKS_SIGNAL = 51
"""As in `pdrun.elastic`, which need not be there for this interpreter."""
KEPT_MODULES = ("sys", "builtins", "__main__", "__mp_main__")
TORN_DOWN_PREFIX = "torch.distributed"
"""
Modules in which scripts leave things that must end with the process (process groups) are torn down
as ever.
"""


class ForkedProgram:
    """What a worker runs: code and the namespace of its ``__main__``, or the name of a module."""

    __slots__ = ("code", "module", "namespace")

    def __init__(
        self, code: types.CodeType | None, space: dict[str, Any], module: str = ""
    ) -> None:
        self.code = code
        self.namespace = space
        self.module = module

    def exec_arguments(self) -> list[Any]:
        """Return the arguments of exec, or the name of a module alone."""
        return [self.module] if self.code is None else [self.code, self.namespace]


def replace_environment(wanted: Mapping[bytes, bytes]) -> None:
    """Make this the environment, of Python and of C."""
    os.environb.clear()
    ctypes.CDLL(None).clearenv()
    os.environb.update(wanted)


def find_argument_memory() -> tuple[int, int, int, int]:
    """Where the kernel finds this process's command line and environment: start and end of each."""
    with open("/proc/self/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    start, end, first, last = (int(words[number - 3]) for number in (48, 49, 50, 51))
    return start, end, first, last


def set_command_line(argv: list[bytes], marker: bytes, *, keep_room: bool = False) -> None:
    """
    Let /proc/PID/cmdline say ``argv``, and the marker in /proc/PID/environ name this worker.

    ``keep_room``: zeros stand behind it, and what is forked from here has all the room that this
    process had.
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
    """
    New sys.stdin, stdout and stderr on descriptors 0, 1 and 2, as the interpreter makes them at its
    start.
    """
    old = sys.stdout, sys.stderr
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: Any = getattr(sys, f"__{name}__")
        try:
            made: io.TextIOWrapper | None = _open_stream(
                number, f"<{name}>", before.encoding, before.errors, unbuffered
            )
        except OSError:
            made = None  # the descriptor is closed: so it is in a process that is executed
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
    logging = sys.modules.get("logging")
    for reference in getattr(logging, "_handlerList", ()):
        handler = reference()
        if getattr(handler, "stream", None) in old:  # made while torch was imported
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
    What an interpreter draws at its start, or at the import of a module, and every worker needs for
    itself.
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
    """
    Apply the thread counts that the libraries would have read; the starter imported them with one
    thread.
    """
    most = len(os.sched_getaffinity(0))  # MKL and OpenBLAS take no more than there are CPUs
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
    Tell every OpenBLAS that is loaded; it makes its threads now, as it does in a process that is
    executed.
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
    In the starter: have ``destroy_process_group`` let go of the interpreter for a moment first.

    torch joins a group's thread while it holds the interpreter, and that thread may need the
    interpreter to drop the last collective's tensor: a script whose end follows within the 5 ms of
    a switch hangs, however it was started. Workers that find torch._dynamo imported are that quick.
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
    Have STACKS_SIGNAL write this worker's stacks into a file beside its agent's socket, as
    `pdrun.elastic` does.
    """
    import faulthandler
    import fcntl

    if not agent:
        return
    try:
        path = f"{agent.rpartition('/')[0]}/{os.getpid()}.stacks"
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)  # scripts may count on 3, 4, ...
        finally:
            os.close(low)
        faulthandler.register(STACKS_SIGNAL, file=high, all_threads=True)
    except (OSError, ValueError):
        pass  # they are then read from outside, as far as that goes


def _is_called_by_torch() -> bool:
    """Whether torch itself sets a variable, for its own children: its compiler does so."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "os":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "torch",
        "triton",
    )


def warn_late_variables(frozen: Callable[[str], bool]) -> None:
    """Say once for each variable that the program sets too late to count; see `importtime`."""
    put = os.putenv
    given = dict(os.environ)
    told = set()

    def putenv(name: Any, value: Any, /) -> None:
        put(name, value)
        text = os.fsdecode(name)
        if (
            text not in told
            and frozen(text)
            and given.get(text) != os.fsdecode(value)
            and not _is_called_by_torch()
        ):
            told.add(text)
            note = f"pdrun: {text} is set after torch was imported and has no effect on it; use --start exec\n"
            os.write(2, note.encode(errors="replace"))

    os.putenv = putenv


def prepare_program(argv: list[str]) -> ForkedProgram | None:
    """
    Lay out ``sys`` and ``__main__`` for a command line as the interpreter does; return what to run.

    None: that needs the interpreter itself (an error in the source, whose report only it words so).
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
        sys.modules["__mp_main__"] = main  # by which a spawned process names what it sends back
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
    """
    Have the exception on its way out reported without the one frame of the starter below the
    program's.
    """
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


class _ModuleProxy:
    """
    Stands in sys.modules for a module that the starter imported, while the interpreter takes the
    others apart.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class FastExit:
    """
    Makes the end of a worker cheap: nothing that the starter imported is taken apart, neither by
    Python nor by C.

    Everything of the worker's own ends as ever: threads are joined, its exit handlers run, its
    objects are destroyed, its files flushed, and libraries that it loaded itself are ended. Made
    before any other exit handler is registered (so that its own runs last), `arm`ed in the worker.
    """

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] | None = None
        atexit.register(self.run_last)

    def freeze_imports(self) -> None:
        """In the starter, after its imports: what is here now belongs to nobody in particular."""
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            found = finalizer.peek()
            if found and (getattr(found[1], "__module__", None) or "").startswith("torch."):
                # operators that torch registered from Python: the process takes them along
                finalizer.atexit = False
        gc.freeze()

    def arm_exit(self) -> None:
        """In the worker: this is one."""
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in KEPT_MODULES and not name.startswith(TORN_DOWN_PREFIX)
        }
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "on_exit"):
            return  # not glibc: the long way out
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        libc["__cxa_atexit"](ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)

    def run_last(self) -> None:
        """
        The last exit handler: flush what is open, and take the starter's modules out of the
        interpreter's sight.
        """
        if self.modules is None:
            return
        for thing in gc.get_objects():
            if issubclass(
                type(thing), io.IOBase
            ):  # not isinstance: a proxy of what is gone would raise
                try:
                    if not thing.closed and thing.writable():
                        thing.flush()
                except Exception:
                    continue
        if len(os.listdir("/proc/self/task")) > 1:
            # A thread of torch that waits for the interpreter to let go of a last tensor must have
            # its turn before process groups are destroyed, which join it; a slow end gives it that
            # by chance, a quick one would hang.
            for _ in range(3):
                time.sleep(0.001)
        kept = []
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                kept.append(module)
                sys.modules[name] = _ModuleProxy(module)  # type: ignore[assignment]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
