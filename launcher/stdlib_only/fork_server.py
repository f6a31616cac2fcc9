"""
The fork server: a process that has imported torch, has done nothing with it, and forks workers.

    python fork_server.py MODULES PADDING

The supervisor starts it. Its socket to the supervisor is descriptor 3. When the imports are done it
sends ``{"why": ""}``, or why it is not fit to fork. A fork is safe if the process has one thread
and no open device. Both are checked before every fork. Each further packet requests one worker: the
command, as the supervisor got it, and the worker's descriptors. An intermediate process forks the
workers and exits, so that they become children of the supervisor, the nearest sub-reaper. The
supervisor reaps them as its own, and they survive the fork server.

    python fork_server.py MODULES warm=SECONDS PATH PADDING

``pdrun warm start`` starts this one. It serves no supervisor and stays between jobs. The supervisor
and the fork server of each job are forked from it (`warm_server`). Its socket, bound to PATH, is
descriptor 3. On descriptor 4 it reports once whether it is ready.

Runs in the workers' interpreter, which needs torch and not pdrun. Its environment is the workers'
import-time environment. PADDING makes room for a worker's command line. No code of the user is
imported here.
"""

import gc
import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this folder: its modules must not be importable in workers

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

    from pdrun.launcher.stdlib_only import (
        fast_exit,
        forked_worker,
        import_env,
        late_variables,
        process_tree,
        watchdog,
        worker_exec,
    )

SOCKET_FD = 3
READY_FD = 4
Environ = dict[bytes, bytes]
MAX_PACKET_BYTES = 1 << 16
MAX_BATCH_REQUESTS = 64
"""Workers that one intermediate process forks."""
_MAX_ERROR_CHARS = 4000
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
"""Devices that may be open at a fork."""


def load_sibling(name: str, **siblings: "ModuleType") -> "ModuleType":
    """
    Load a file of this folder without adding it to ``sys.modules``, which workers inherit.

    Args:
        siblings: modules that the file imports by name when it is not loaded this way.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_pdrun_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(siblings)
    spec.loader.exec_module(module)
    return module


class ForkRequest:
    """A worker to fork: where to report, its descriptors, its command, and who requests it."""

    def __init__(self, facts: "dict[str, Any]", descriptors: "list[int]") -> None:
        self.report_fd, self.command_fd, *self.streams = descriptors
        self.facts = facts
        self.command: dict[str, Any] = {}

    def close(self) -> None:
        """Close the descriptors."""
        for number in (self.report_fd, self.command_fd, *self.streams):
            os.close(number)

    def report_error(self, error: OSError) -> None:
        """Tell the supervisor why there is no worker."""
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
    """Return what the imports printed. Each worker prints it, too, as if it had imported them."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.pread(2, 1 << 16, 0)
    except OSError:
        return b""


def remap_streams(streams: "list[int]") -> None:
    """
    Move the descriptors to 0, 1, 2, ...

    They were received while those numbers were in use, so all are higher and none is overwritten.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


class ForkServer:
    """
    Serves one supervisor.

    Args:
        connection: the socket to the supervisor.
        worker_exit: makes the exit of workers fast.
        import_output: what the imports printed.
        environ_before: the environment before the imports.
    """

    def __init__(
        self,
        connection: socket.socket,
        worker_exit: "fast_exit.FastExit",
        import_output: bytes,
        environ_before: Environ,
    ) -> None:
        self.connection = connection
        self.worker_exit = worker_exit
        self.import_output = import_output
        changed = os.environb.items() - environ_before.items()
        self.set_by_import = {name: (environ_before.get(name), value) for name, value in changed}

    def send_status(self, why: str) -> None:
        """Tell the supervisor that this process can fork (empty), or why not."""
        self.connection.send(json.dumps({"why": why}).encode())

    def serve_requests(self) -> "forked_worker.ForkedProgram":
        """Fork workers until the supervisor closes the socket; returns in workers only."""
        while True:
            requests = self.read_requests()
            why = why_not_forkable()
            if why:
                self.send_status(why)
                os._exit(1)
            program = self.fork_workers(requests)
            if program is not None:
                return program
            for request in requests:
                request.close()

    def read_requests(self) -> "list[ForkRequest]":
        """Wait for a request; return it with all others that have arrived."""
        found: list[ForkRequest] = []
        while len(found) < MAX_BATCH_REQUESTS:
            flags = socket.MSG_CMSG_CLOEXEC
            if found:
                flags |= socket.MSG_DONTWAIT
            try:
                # not socket.recv_fds, which drops its flags
                data, ancillary, _, _ = self.connection.recvmsg(
                    MAX_PACKET_BYTES, socket.CMSG_SPACE(64 * 4), flags
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

    def fork_workers(self, requests: "list[ForkRequest]") -> "forked_worker.ForkedProgram | None":
        """Fork a worker for each request; return the program in a worker, None in this process."""
        hold, go = os.pipe()
        try:
            intermediate = os.fork()
        except OSError as error:
            for request in requests:
                request.report_error(error)
            intermediate = -1
        if intermediate == 0:
            os.close(go)
            own_pid = os.getpid()
            for request in requests:
                try:
                    if os.fork() == 0:
                        return self.become_worker(request, requests, hold, own_pid)
                except OSError as error:
                    request.report_error(error)
            os._exit(0)
        if intermediate > 0:
            os.waitpid(intermediate, 0)  # now the workers are children of the supervisor
        os.close(go)
        os.close(hold)
        return None

    def become_worker(
        self, request: ForkRequest, requests: "list[ForkRequest]", hold: int, intermediate: int
    ) -> "forked_worker.ForkedProgram":
        """
        Turn this forked process into the worker of a request.

        The order matters: identity, descriptors, folder and CPUs before any thread. The program
        runs only after the parent has changed to the supervisor, so that PDEATHSIG refers to it.
        An error is reported to the supervisor as one of exec is.
        """
        stage = "session"
        try:
            os.write(request.report_fd, f"pid {os.getpid()}\n".encode())
            os.setsid()
            self.connection.close()
            for other in requests:
                if other is not request:
                    other.close()
            size = os.fstat(request.command_fd).st_size
            command = json.loads(os.pread(request.command_fd, size, 0))
            os.close(request.command_fd)
            remap_streams(request.streams)
            stage = command["cwd"]
            os.chdir(worker_exec.encode_text(command["cwd"]))
            if command["cpus"]:
                stage = f"CPUs {command['cpus']}"
                os.sched_setaffinity(0, command["cpus"])
            stage = command["argv"][0]
            try:
                program = self.prepare_worker(request, command)
            except Exception:  # of any kind: a new interpreter is the safe way
                program = None
            os.read(hold, 1)  # returns when the intermediate process, or the fork server, has ended
            os.close(hold)
            while os.getppid() == intermediate:
                time.sleep(0.001)
            process_tree.prctl(process_tree.PR_SET_PDEATHSIG, 9)
            if os.getppid() != request.facts["keeper"]:
                os._exit(127)
            if self.import_output:
                os.write(2, self.import_output)
            if program is None:
                argv = [worker_exec.encode_text(word) for word in command["argv"]]
                worker_exec.exec_program(argv, self.environ)
            self.worker_exit.arm_exit()
            os.close(request.report_fd)
            return program
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or 22
            text = f"{number} {stage}: {os.strerror(number)}"
            os.write(request.report_fd, text[:_MAX_ERROR_CHARS].encode("utf-8", "replace"))
            os._exit(127)

    def prepare_worker(
        self, request: ForkRequest, command: "dict[str, Any]"
    ) -> "forked_worker.ForkedProgram | None":
        """Do everything that exec and the start of an interpreter would have done."""
        marker = watchdog.marker_value(request.facts["token"], request.facts["slot"])
        command["env"][watchdog.MARKER_VARIABLE] = marker
        encode = worker_exec.encode_text
        self.environ = {encode(name): encode(value) for name, value in command["env"].items()}
        argv = [encode(word) for word in command["argv"]]
        if any(b"\0" in word for word in (*argv, *self.environ, *self.environ.values())):
            raise ValueError("embedded null byte")
        forked_worker.replace_environment(self.environ)
        for name, (before, value) in self.set_by_import.items():
            if self.environ.get(name) == before:
                os.environb[name] = value  # as the import would have done in this process
        forked_worker.set_command_line(argv, f"{watchdog.MARKER_VARIABLE}={marker}".encode())
        forked_worker.reopen_streams()
        forked_worker.renew_process_state()
        forked_worker.set_thread_counts(os.environ)
        forked_worker.register_stacks(os.environ.get("PDRUN_AGENT", ""))
        program = forked_worker.prepare_program([os.fsdecode(word) for word in argv])
        agent = os.environ.get("PDRUN_AGENT", "")
        late_variables.LateVariables(
            lambda names: late_variables.report_to_agent(agent, names)
        ).start()
        return program


def load_modules(modules: str, worker_exit: "fast_exit.FastExit") -> str:
    """Import modules and prepare this process for forks; return why that failed, or empty."""
    why = import_modules(modules.split(","))
    forked_worker.patch_destroy_process_group()
    late_variables.watch_imports()
    worker_exit.freeze_imports()
    return why


def serve_warm(
    argv: "list[str]", worker_exit: "fast_exit.FastExit"
) -> "tuple[socket.socket, bytes]":
    """
    Import, then stay between jobs; returns in the fork server of a job only.

    Returns:
        its socket to the job's supervisor, and what the imports printed.
    """
    import_tracker = load_sibling("import_tracker")
    warm_server = load_sibling("warm_server")
    environ = dict(os.environ)
    with import_tracker.EnvironLookups() as lookups:
        why = load_modules(argv[1], worker_exit)
    import_output = read_import_output()
    os.dup2(0, 2)  # output from here on is not output of the imports
    server = None
    if not why:
        forked_worker.set_command_line(
            [os.fsencode(word) for word in (sys.executable, *argv[:4])], b"", keep_room=True
        )
        server = warm_server.WarmServer(
            socket.socket(fileno=SOCKET_FD),
            argv[3],
            float(argv[2].partition("=")[2]),
            why_not_forkable,
            lookups,
            environ,
            import_tracker.ImportedFiles(),
            load_warm_siblings(),
        )
    os.write(READY_FD, json.dumps({"why": why}).encode())
    os.close(READY_FD)
    if server is None:
        os._exit(1)
    return server.serve_until_idle(), import_output


def load_warm_siblings() -> "dict[str, ModuleType]":
    """Return the modules that a warm process needs, by name."""
    fork_client = load_sibling("fork_client", watchdog=watchdog, worker_exec=worker_exec)
    leftovers = load_sibling("leftovers", process_tree=process_tree, watchdog=watchdog)
    supervisor = load_sibling(
        "supervisor",
        fork_client=fork_client,
        leftovers=leftovers,
        process_tree=process_tree,
        watchdog=watchdog,
        worker_exec=worker_exec,
    )
    return {
        "fork_client": fork_client,
        "forked_worker": forked_worker,
        "import_env": import_env,
        "inherited_state": load_sibling("inherited_state"),
        "process_tree": process_tree,
        "supervisor": supervisor,
        "watchdog": watchdog,
    }


def main(argv: "list[str]") -> "forked_worker.ForkedProgram":
    """Import, check, and serve; returns in workers only."""
    os.set_inheritable(SOCKET_FD, False)
    worker_exit = fast_exit.FastExit()
    environ_before = dict(os.environb)
    if argv[2].startswith("warm="):
        why = ""
        connection, import_output = serve_warm(argv, worker_exit)
    else:
        why = load_modules(argv[1], worker_exit)
        connection = socket.socket(fileno=SOCKET_FD)
        import_output = read_import_output()
    server = ForkServer(connection, worker_exit, import_output, environ_before)
    server.send_status(why)
    if why:
        os._exit(1)
    return server.serve_requests()


if __name__ == "__main__":
    process_tree = load_sibling("process_tree")
    watchdog = load_sibling("watchdog", process_tree=process_tree)
    worker_exec = load_sibling("worker_exec", process_tree=process_tree, watchdog=watchdog)
    fast_exit = load_sibling("fast_exit")
    forked_worker = load_sibling("forked_worker")
    import_env = load_sibling("import_env")
    late_variables = load_sibling("late_variables")
    program = main(sys.argv).exec_arguments()
    run_module = vars(importlib.import_module("runpy"))["_run_module_as_main"]

    # This module's frame is the only one below the program's own. `pop` leaves no reference to the
    # program's namespace here: it must end with the program.
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
