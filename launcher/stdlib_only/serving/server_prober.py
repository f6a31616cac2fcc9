"""
The worker of `pdrun serve`: starts a server, probes it over HTTP, and ends as it ends.

    placeholders -> start the server -> ready probe, once -> health probes
                          |                                       | failed too often
                          v                                       v
                    it ends: exit with its code             end it, exit 69

The server stays in the process group of this process, which gets every signal of pdrun. So signals
are only noted here. What the server leaves behind is ended by pdrun, as after any worker.

Run by path, in the workers' interpreter. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

EXIT_UNAVAILABLE = 69
READY_POLL_SECONDS = 0.5
STOP_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL for a server that failed its probes."""
MAX_ANSWER_BYTES = 1 << 20
MAX_PORT = 65535
PLACEHOLDERS = (
    "rank",
    "world_size",
    "local_rank",
    "node_rank",
    "nodes",
    "devices",
    "tp",
    "host",
    "head",
    "port",
    "init_port",
    "group",
)
PLACEHOLDER = re.compile(r"\{(\{?)(" + "|".join(PLACEHOLDERS) + r")\}(\}?)")
NOTED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class ProbeError(Exception):
    """A probe failed; the text says how."""


def placeholder_values(settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each placeholder for this worker."""
    rank = int(environ["RANK"])
    devices = int(settings["devices"])
    nodes = int(environ["GROUP_WORLD_SIZE"])
    head = environ["MASTER_ADDR"]
    port = int(settings["port"]) + rank
    if port > MAX_PORT:
        raise ProbeError(f"{{port}} is {port}, more than {MAX_PORT}; use a smaller --port")
    return {
        "rank": str(rank),
        "world_size": environ["WORLD_SIZE"],
        "local_rank": environ["LOCAL_RANK"],
        "node_rank": environ["GROUP_RANK"],
        "nodes": str(nodes),
        "devices": str(devices),
        "tp": str(devices * nodes),
        "host": head if environ["GROUP_RANK"] == "0" else find_own_address(head),
        "head": head,
        "port": str(port),
        "init_port": str(settings["init_port"]),
        "group": str(settings["group"]),
    }


def find_own_address(peer: str) -> str:
    """Return this machine's address on the route to another, or its name."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values for ``{name}``, and ``{name}`` for ``{{name}}``."""

    def replace(match: re.Match[str]) -> str:
        if match[1] and match[3]:
            return f"{{{match[2]}}}"
        return f"{match[1]}{values[match[2]]}{match[3]}"

    return PLACEHOLDER.sub(replace, text)


def send_request(
    url: str, body: Any, timeout: float, key: str, method: str = ""
) -> tuple[int, bytes]:
    """
    Send a request; return status and answer.

    Raises:
        ProbeError: no complete answer came in time.
    """
    import http.client
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
    if parts.scheme == "https":
        kind = http.client.HTTPSConnection
    headers = {"Connection": "close"}
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    if key:
        headers["Authorization"] = f"Bearer {key}"
    method = method or ("GET" if data is None else "POST")
    deadline = time.monotonic() + timeout
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    path = parts.path or "/"
    if parts.query:
        path = f"{path}?{parts.query}"
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        parts_read = []
        size = 0
        # read1: a server that sends a byte now and then must not hold the probe for ever
        while size < MAX_ANSWER_BYTES and (part := answer.read1(65536)):
            parts_read.append(part)
            size += len(part)
            if time.monotonic() > deadline:
                raise TimeoutError
        return answer.status, b"".join(parts_read)
    except TimeoutError:
        raise ProbeError(f"no answer within {timeout:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ProbeError(str(reason)) from None
    finally:
        connection.close()


def check_ready(url: str, timeout: float, key: str) -> None:
    """Raise a ProbeError unless a GET of the URL is answered with success."""
    status, _ = send_request(url, None, timeout, key)
    if not 200 <= status < 300:
        raise ProbeError(f"HTTP {status}")


def find_model(url: str, timeout: float, key: str) -> str:
    """Return the name of the first model of an OpenAI-like server; empty: it has no list."""
    base = re.sub(r"/(chat/)?completions$", "", url.partition("?")[0])
    try:
        status, answer = send_request(f"{base}/models", None, timeout, key)
        return str(json.loads(answer)["data"][0]["id"]) if status == 200 else ""
    except (ProbeError, ValueError, LookupError, TypeError):
        return ""


def generation_request(url: str, model: str) -> dict[str, Any]:
    """Return the body that makes an OpenAI-like server generate one token."""
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
    if model:
        body["model"] = model
    if url.partition("?")[0].endswith("/chat/completions"):
        return {**body, "messages": [{"role": "user", "content": "1"}]}
    return {**body, "prompt": "1"}


def check_health(url: str, body: Any, timeout: float, key: str) -> None:
    """
    Raise a ProbeError unless the server generates.

    Args:
        body: of the request; None: that of an OpenAI-like server.
    """
    is_own_body = body is not None
    if not is_own_body:
        body = generation_request(url, find_model(url, timeout, key))
    status, answer = send_request(url, body, timeout, key)
    if not 200 <= status < 300:
        raise ProbeError(f"HTTP {status}: {answer[:200].decode('utf-8', 'replace')!r}")
    try:
        found = json.loads(answer)
    except ValueError:
        raise ProbeError("the answer is not JSON") from None
    if isinstance(found, dict) and found.get("error"):
        raise ProbeError(f"the answer is an error: {str(found['error'])[:200]!r}")
    if not found:
        raise ProbeError("the answer is empty")
    if is_own_body:
        return
    usage = found.get("usage") if isinstance(found, dict) else None
    generated = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(found, dict) or not found.get("choices") or generated == 0:
        raise ProbeError("the server answered without generating a token")


class ServerProber:
    """Starts the server, and probes it in a thread."""

    def __init__(self, settings: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._values = placeholder_values(settings, environ)
        self._key = environ.get(str(settings["key_variable"]), "")
        self._started = time.monotonic()
        self._pid = 0
        self._has_ended = threading.Event()
        self.is_stopping = False
        """Whether a signal asked this worker to end."""
        self.failure = ""
        """Why the server was ended."""

    def start_server(self, command: list[str]) -> None:
        """
        Start the server.

        Raises:
            OSError: it cannot be executed.
        """
        argv = [fill_placeholders(word, self._values) for word in command]
        numbers = {getattr(signal, name) for name in NOTED_SIGNALS}
        self._pid = os.posix_spawnp(argv[0], argv, os.environ, setsigdef=numbers)
        rank = int(self._values["rank"])
        is_probed = any(low <= rank <= high for low, high in self._settings["probed"])
        if is_probed and (self._settings["ready"] or self._settings["health"]):
            threading.Thread(target=self._probe_server, daemon=True).start()

    def wait_server(self) -> int:
        """Wait for the end of the server; return its wait status."""
        status = os.waitpid(self._pid, 0)[1]
        self._has_ended.set()
        return status

    def note_signal(self, number: int, frame: object) -> None:
        """Note a signal: the server is in the same process group and has got it, too."""
        self.is_stopping = self.is_stopping or number not in (signal.SIGUSR1, signal.SIGUSR2)

    def print_line(self, text: str) -> None:
        """Print a line on stderr; a closed one is no reason to end."""
        try:
            os.write(2, f"pdrun: rank {self._values['rank']}: {text}\n".encode())
        except OSError:
            pass

    def _probe_server(self) -> None:
        try:
            self._await_ready()
            if self._settings["health"]:
                self._watch_health()
        except ProbeError as error:
            self.failure = str(error)
            self._stop_server()

    def _await_ready(self) -> None:
        settings = self._settings
        url = fill_placeholders(settings["ready"] or settings["health"], self._values)
        deadline = self._started + settings["ready_timeout"]
        while True:
            left = deadline - time.monotonic()
            timeout = max(0.1, min(settings["health_timeout"], left))
            try:
                if settings["ready"]:
                    check_ready(url, timeout, self._key)
                else:
                    self._check_health(url, timeout)
            except ProbeError as error:
                if left <= 0:
                    wait = f"{settings['ready_timeout']:g} s"
                    raise ProbeError(f"not ready within {wait}: {url}: {error}") from None
            else:
                taken = time.monotonic() - self._started
                self.print_line(f"ready after {taken:.1f} s: {url}")
                return
            if self._has_ended.wait(min(READY_POLL_SECONDS, max(0.0, left))):
                return

    def _watch_health(self) -> None:
        settings = self._settings
        url = fill_placeholders(settings["health"], self._values)
        failed = 0
        while not self._has_ended.wait(settings["health_interval"]):
            try:
                self._check_health(url, settings["health_timeout"])
            except ProbeError as error:
                failed += 1
                most = settings["health_failures"]
                if self.is_stopping or self._has_ended.is_set():
                    return
                if failed >= most:
                    times = f"{most} times in a row" if most > 1 else "once"
                    raise ProbeError(f"health probe failed {times}: {url}: {error}") from None
                self.print_line(f"health probe failed ({failed} of {most}): {url}: {error}")
            else:
                failed = 0

    def _check_health(self, url: str, timeout: float) -> None:
        body = self._settings["health_body"]
        if body is not None:
            body = json.loads(fill_placeholders(json.dumps(body), self._values))
        check_health(url, body, timeout, self._key)

    def _stop_server(self) -> None:
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            if self._has_ended.is_set():
                return
            try:
                os.kill(self._pid, number)
                os.kill(self._pid, signal.SIGCONT)
            except ProcessLookupError:  # it has ended, and was waited for, in this moment
                return
            self._has_ended.wait(seconds)


def exit_as(status: int) -> NoReturn:
    """End as a process with that wait status did: with its code, or by its signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's core is the useful one
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(argv: list[str]) -> NoReturn:
    """Run the server of ``argv``: the settings as JSON, then its command."""
    settings = json.loads(argv[0])

    def fail(text: str, code: int) -> NoReturn:
        # the agent takes a last line with this beginning as the reason
        os.write(2, f"pdrun: error: {text}\n".encode("utf-8", "backslashreplace"))
        os._exit(code)

    try:
        prober = ServerProber(settings, os.environ)
    except ProbeError as error:
        fail(str(error), 2)
    for name in NOTED_SIGNALS:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, prober.note_signal)
    try:
        prober.start_server(argv[1:])
    except OSError as error:
        fail(f"{argv[1]} cannot be started: {os.strerror(error.errno or 0)}", 126)
    status = prober.wait_server()
    if prober.failure:
        fail(prober.failure, EXIT_UNAVAILABLE)
    if status == 0 and not prober.is_stopping:
        fail("the server ended by itself, with exit code 0", 1)
    exit_as(status)


if __name__ == "__main__":
    main(sys.argv[1:])
