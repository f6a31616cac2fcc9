"""
The starter: a process that has imported torch, has done nothing with it, and forks workers.

    python fork_server.py MODULES PADDING        started by the keeper, its socket as fd 3

It says ``{"why": ""}`` when it is ready, or why it is not fit: one thread and no device are what
makes a fork safe, and both are looked at before every fork. A message then is one worker: the
command (as the keeper gets it) and the worker's descriptors. Workers are made by a process between,
which ends at once, so that they come to the keeper, the nearest sub-reaper: it reaps them as its
own, and nothing happens to them when the starter goes.

    python fork_server.py MODULES warm=SECONDS PATH PADDING        started by ``pdrun warm start``

This one serves no keeper: it stays between jobs, and each job's keeper and starter are forked from
it (`warm_server`). Its socket, bound to PATH, is fd 3; on fd 4 it says once whether it is ready.

Run with the *workers'* interpreter, which needs torch and not pdrun; its environment is the
workers' import-time one. PADDING makes room for a worker's command line. Nothing of the user's is
imported here.
"""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the launcher's folder: its modules are not the workers'

import array
import importlib
import importlib.util
import json
import os
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from pdrun.launcher.stdlib_only import forked_worker, import_env, supervisor

SOCKET_FD = 3
READY_FD = 4
Environ = dict[bytes, bytes]
MAX_PACKET_BYTES = 1 << 16
MAX_BATCH_REQUESTS = 64
PLAIN_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/pts/",
    "/dev/ptmx",
    "/dev/shm/",
)


def load_sibling(name: str) -> "ModuleType":
    """Load a file of this folder; no trace of it stays among the modules that a worker sees."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_pdrun_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ForkRequest:
    """One worker to be forked: where to report, its descriptors, its command and who asks."""

    def __init__(self, facts: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.report_fd, self.command_fd, *self.streams = descriptors
        self.facts = facts
        self.command: dict[str, Any] = {}

    def close(self) -> None:
        """Let go of the descriptors."""
        for number in (self.report_fd, self.command_fd, *self.streams):
            os.close(number)

    def report_error(self, error: OSError) -> None:
        """Tell the keeper why there is no worker."""
        os.write(self.report_fd, f"{error.errno} {error.strerror}\n".encode())


def why_not_forkable() -> str:
    """Return why this process must not fork, or the empty string."""
    count = len(os.listdir("/proc/self/task"))
    if count != 1:
        return f"importing torch left {count} threads"
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            try:
                path = os.readlink(entry.path)
            except OSError:
                continue
            if path.startswith("/dev/") and not path.startswith(PLAIN_DEVICES):
                return f"importing torch opened {path}"
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", "npu", "musa", "mlu"):
        device = vars(torch).get(name) if torch is not None else None
        if getattr(device, "is_initialized", bool)() or getattr(device, "_is_in_bad_fork", bool)():
            return f"torch.{name} was initialised by an import"
    return ""


def import_modules(names: "list[str]") -> str:
    """Import what workers need; return why that failed, or the empty string."""
    if sys.implementation.name != "cpython" or not sys.platform.startswith("linux"):
        return f"{sys.implementation.name} on {sys.platform} is not known to fork safely"
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
    finally:
        gc.enable()
    return why_not_forkable()


def read_import_output() -> bytes:
    """What the imports printed: each worker prints it too, as it would have."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.pread(2, 1 << 16, 0)
    except OSError:
        return b""


def remap_streams(streams: "list[int]") -> None:
    """
    Give the descriptors the numbers 0, 1, 2, ...; they came while those were in use, so all are
    higher.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


class ForkServer:
    """Serves one supervisor."""

    def __init__(
        self,
        connection: socket.socket,
        leaving: "forked_worker.FastExit",
        printed: bytes,
        before: Environ,
    ) -> None:
        self.connection = connection
        self.fast_exit = leaving
        self.import_output = printed
        changed = os.environb.items() - before.items()
        self.set_by_import = {name: (before.get(name), value) for name, value in changed}

    def send_status(self, why: str) -> None:
        """Tell the keeper whether this process can fork."""
        self.connection.send(json.dumps({"why": why}).encode())

    def serve_requests(self) -> "forked_worker.ForkedProgram":
        """Fork what is asked for until the keeper closes the socket; returns in workers only."""
        while True:
            orders = self.read_requests()
            why = why_not_forkable()
            if why:
                self.send_status(why)
                os._exit(1)
            program = self.fork_workers(orders)
            if program is not None:
                return program
            for order in orders:
                order.close()

    def read_requests(self) -> "list[ForkRequest]":
        """Wait for an order; return it with those that are there already."""
        found: list[ForkRequest] = []
        while len(found) < MAX_BATCH_REQUESTS:
            try:
                data, ancillary, _, _ = self.connection.recvmsg(  # recv_fds drops its flags
                    MAX_PACKET_BYTES,
                    socket.CMSG_SPACE(64 * 4),
                    socket.MSG_CMSG_CLOEXEC | (socket.MSG_DONTWAIT if found else 0),
                )
            except BlockingIOError:
                break
            if not data:
                if found:
                    break
                os._exit(0)
            descriptors = array.array("i")
            for _, _, block in ancillary:
                descriptors.frombytes(block[: len(block) - len(block) % descriptors.itemsize])
            found.append(ForkRequest(json.loads(data), list(descriptors)))
        return found

    def fork_workers(self, orders: "list[ForkRequest]") -> "forked_worker.ForkedProgram | None":
        """Make a worker of each order; returns the program in a worker, None here."""
        hold, go = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            for order in orders:
                order.report_error(error)
            between = -1
        if between == 0:
            os.close(go)
            myself = os.getpid()
            for order in orders:
                try:
                    if os.fork() == 0:
                        return self.become_worker(order, orders, hold, myself)
                except OSError as error:
                    order.report_error(error)
            os._exit(0)
        if between > 0:
            os.waitpid(between, 0)  # from here on the workers are the keeper's
        os.close(go)
        os.close(hold)
        return None

    def become_worker(
        self, order: ForkRequest, orders: "list[ForkRequest]", hold: int, between: int
    ) -> "forked_worker.ForkedProgram":
        """The worker's side: take its place; an error goes to the keeper as one of exec does."""
        stage = "session"
        try:
            os.write(order.report_fd, f"pid {os.getpid()}\n".encode())
            os.setsid()
            self.connection.close()
            for other in orders:
                if other is not order:
                    other.close()
            command = json.loads(os.pread(order.command_fd, os.fstat(order.command_fd).st_size, 0))
            os.close(order.command_fd)
            remap_streams(order.streams)
            stage = command["cwd"]
            os.chdir(supervisor.encode_text(command["cwd"]))
            if command["cpus"]:
                stage = f"CPUs {command['cpus']}"
                os.sched_setaffinity(0, command["cpus"])
            stage = command["argv"][0]
            try:
                program = self.prepare_worker(order, command)
            except Exception:  # of any kind: then the interpreter itself is what cannot be wrong
                program = None
            os.read(hold, 1)  # ends when the process between has, or the starter
            os.close(hold)
            while os.getppid() == between:
                time.sleep(0.001)
            supervisor.prctl(supervisor.PR_SET_PDEATHSIG, 9)
            if os.getppid() != order.facts["keeper"]:
                os._exit(127)
            if self.import_output:
                os.write(2, self.import_output)
            if program is None:
                supervisor.exec_program(
                    [supervisor.encode_text(word) for word in command["argv"]], self.environ
                )
            self.fast_exit.arm_exit()
            os.close(order.report_fd)
            return program
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or 22
            os.write(
                order.report_fd,
                f"{number} {stage}: {os.strerror(number)}"[:4000].encode("utf-8", "replace"),
            )
            os._exit(127)

    def prepare_worker(
        self, order: ForkRequest, command: "dict[str, Any]"
    ) -> "forked_worker.ForkedProgram | None":
        """Everything that exec and the start of an interpreter would have done."""
        slot = supervisor.marker_value(order.facts["token"], order.facts["slot"])
        command["env"][supervisor.MARKER_VARIABLE] = slot
        self.environ = {
            supervisor.encode_text(name): supervisor.encode_text(value)
            for name, value in command["env"].items()
        }
        argv = [supervisor.encode_text(word) for word in command["argv"]]
        if any(b"\0" in word for word in (*argv, *self.environ, *self.environ.values())):
            raise ValueError("embedded null byte")
        forked_worker.replace_environment(self.environ)
        for name, (before, value) in self.set_by_import.items():
            if self.environ.get(name) == before:
                os.environb[name] = value  # as the import would have in this process
        forked_worker.set_command_line(argv, f"{supervisor.MARKER_VARIABLE}={slot}".encode())
        forked_worker.reopen_streams()
        forked_worker.renew_process_state()
        forked_worker.set_thread_counts(os.environ)
        forked_worker.register_stacks(os.environ.get("PDRUN_AGENT", ""))
        forked_worker.warn_late_variables(import_env.is_import_variable)
        return forked_worker.prepare_program([os.fsdecode(word) for word in argv])


def load_modules(modules: str, leaving: "forked_worker.FastExit") -> str:
    """
    Import and make this process one to fork from; return why that failed, or the empty string.
    """
    why = import_modules(modules.split(","))
    forked_worker.patch_destroy_process_group()
    leaving.freeze_imports()
    return why


def serve_warm(
    argv: "list[str]", leaving: "forked_worker.FastExit"
) -> "tuple[socket.socket, bytes]":
    """
    Import, then stay between jobs; returns in the starter of a job: its socket to the job's keeper,
    and `noise`.
    """
    import_tracker = load_sibling("import_tracker")
    inherited_state = load_sibling("inherited_state")
    warm_server = load_sibling("warm_server")
    tools = {
        "supervisor": supervisor,
        "inherited_state": inherited_state,
        "import_env": import_env,
        "forked_worker": forked_worker,
    }
    environ = dict(os.environ)
    with import_tracker.EnvironLookups() as lookups:
        why = load_modules(argv[1], leaving)
    printed = read_import_output()
    os.dup2(0, 2)  # what is printed from here on is no word of an import
    server = None
    if not why:
        forked_worker.set_command_line(
            [os.fsencode(word) for word in (sys.executable, *argv[:4])], b"", keep_room=True
        )
        listener = socket.socket(fileno=SOCKET_FD)
        idle = float(argv[2].partition("=")[2])
        server = warm_server.WarmServer(
            listener,
            argv[3],
            idle,
            why_not_forkable,
            lookups,
            environ,
            import_tracker.ImportedFiles(),
            tools,
        )
    os.write(READY_FD, json.dumps({"why": why}).encode())
    os.close(READY_FD)
    if server is None:
        os._exit(1)
    return server.serve_until_idle(), printed


def main(argv: "list[str]") -> "forked_worker.ForkedProgram":
    """Import, check, and serve; returns in workers only."""
    os.set_inheritable(SOCKET_FD, False)
    leaving = forked_worker.FastExit()
    before = dict(os.environb)
    if argv[2].startswith("warm="):
        why, (connection, printed) = "", serve_warm(argv, leaving)
    else:
        why = load_modules(argv[1], leaving)
        connection = socket.socket(fileno=SOCKET_FD)
        printed = read_import_output()
    starter = ForkServer(connection, leaving, printed, before)
    starter.send_status(why)
    if why:
        os._exit(1)
    return starter.serve_requests()


if __name__ == "__main__":
    supervisor = load_sibling("supervisor")
    forked_worker = load_sibling("forked_worker")
    import_env = load_sibling("import_env")
    program = main(sys.argv).exec_arguments()
    run_module = vars(importlib.import_module("runpy"))["_run_module_as_main"]

    # One frame of the starter's lies below the program's own, and no more. Nothing here keeps its
    # namespace alive.
    try:
        if len(program) == 2:
            exec(program.pop(0), program.pop())  # noqa: S102  the user's own program
        else:
            run_module(program.pop())
    except SystemExit:
        raise
    except BaseException:
        forked_worker.hide_own_frame()
        raise
