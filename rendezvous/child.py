"""
The scheduler as a child of the first node's agent: started, its address learned, its death noticed at once.

The listening socket is bound here, so that a port in use is reported before anything starts, and inherited; the
secret goes over stdin; the end of stdin tells the child that its agent has died.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from pdrun.errors import ConfigError, RendezvousError
from pdrun.net import Endpoint, parse_endpoint
from pdrun.rendezvous.codec import to_plain
from pdrun.rendezvous.events import SchedulerConfig
from pdrun.rendezvous.listen import bind_listener
from pdrun.rendezvous.security import Secret

START_TIMEOUT = 30.0
"""Seconds for the child to listen; a process start and two imports, on a machine that may be busy."""


class SchedulerChild:
    """A running scheduler process. `fileno` becomes readable when it ends."""

    def __init__(
        self, config: SchedulerConfig, secret: Secret | None, *, endpoint: Endpoint | None = None,
        listen_fd: int | None = None, events_path: Path | str | None = None, insecure: bool = False,
        timeout: float = START_TIMEOUT,
    ) -> None:  # fmt: skip
        """
        Start it and wait until it listens.

        Args:
            endpoint: where to listen (port 0: the system chooses), or
            listen_fd: a listening socket to hand over; the caller may close its own copy afterwards.
            events_path: file of the event log; None: none is written.

        Raises:
            ConfigError: the address cannot be listened on.
            RendezvousError: the process did not come up.
        """
        if (endpoint is None) == (listen_fd is None):
            raise ValueError("give either an endpoint or a listening descriptor")
        fd = bind_listener(endpoint).detach() if endpoint else os.dup(listen_fd if listen_fd is not None else -1)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdrun.rendezvous.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=(fd,), start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            os.close(fd)
        order = {
            "config": to_plain(config), "secret": secret.reveal().hex() if secret else None, "listen_fd": fd,
            "host": "", "port": 0, "events": str(events_path) if events_path else None, "insecure": insecure,
        }  # fmt: skip
        try:
            self._give(json.dumps(order).encode() + b"\n")
            self.endpoint: Endpoint = self._await_endpoint(timeout)
        except BaseException:
            self._end(0.0)
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status as `subprocess` tells it; None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """A descriptor that becomes readable (at its end) when the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def close(self, timeout: float = 5.0) -> None:
        """
        Let it go. After the verdict it ends by itself as soon as every node has left; before, this ends the job.

        It is killed after ``timeout`` seconds.
        """
        self._end(timeout)

    def _give(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            pass  # the missing answer tells

    def _await_endpoint(self, timeout: float) -> Endpoint:
        line, deadline = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.fileno()], [], [], left)[0]:
                raise RendezvousError(f"the scheduler process did not come up within {timeout:g} s")
            more = os.read(self.fileno(), 65536)
            if not more:
                raise RendezvousError(f"the scheduler process ended at once (status {self._process.wait(5)})")
            line += more
        answer = json.loads(line)
        if "endpoint" not in answer:
            kind = ConfigError if answer.get("code") == ConfigError.exit_code else RendezvousError
            raise kind(str(answer.get("error")), where="scheduler")
        return parse_endpoint(answer["endpoint"], where="scheduler")

    def _end(self, timeout: float) -> None:
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
