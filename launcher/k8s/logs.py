"""
The output of all pods of a job, as one stream: ``kubectl logs`` of every pod, merged by line.

A worker's line has pdrun's prefix ``host:rank|`` already. Other lines get the pod's name. Pods that
have not started are waited for when the output is followed.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable
from typing import BinaryIO

from pdrun.errors import PdrunError
from pdrun.launcher.k8s.kubectl import Kubectl
from pdrun.launcher.k8s.pod import CONTAINER_NAME, JOB_LABEL
from pdrun.launcher.k8s.pods import PodState, read_pods

LIST_SECONDS = 2.0
"""How often pods are looked for while the output is followed."""
MAX_LINE_BYTES = 1 << 16
_WORKER_PREFIX = re.compile(rb"[^\s|]{1,253}:[0-9]+\| ?")


class PodLogs:
    """
    Prints the logs of a job's pods.

    Args:
        kubectl: how the cluster is reached.
        name: the job.
        write: gets each line, with its end.
        container: name of pdrun's container.
        tail: lines per pod from the end; None: all.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        name: str,
        write: Callable[[bytes], object],
        *,
        container: str = CONTAINER_NAME,
        tail: int | None = None,
    ) -> None:
        self._kubectl = kubectl
        self._name = name
        self._write = write
        self._container = container
        self._tail = tail
        self._selector = selectors.DefaultSelector()
        self._parts: dict[str, bytes] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.failures: dict[str, str] = {}
        """Pod -> why its log could not be read."""

    def list_pods(self) -> list[PodState]:
        """Return the job's pods."""
        return read_pods(self._kubectl.list_items("pods", "-l", f"{JOB_LABEL}={self._name}"))

    def print_all(self, *, follow: bool, only: str = "") -> None:
        """
        Print the logs of the pods; with ``follow`` until all have ended.

        Args:
            follow: wait for pods that have not started, and for more output.
            only: name or index of one pod; empty: all.

        Raises:
            RendezvousError: the pods cannot be listed.
        """
        try:
            pods = self._start_readers(only, follow=follow)
            listed = time.monotonic()
            while self._parts or (follow and not _have_all_ended(pods)):
                self._read_once(LIST_SECONDS if follow else None)
                if follow and time.monotonic() - listed >= LIST_SECONDS:
                    pods = self._start_readers(only, follow=True)
                    listed = time.monotonic()
        finally:
            self._stop_readers()

    def _start_readers(self, only: str, *, follow: bool) -> list[PodState]:
        """Start a reader for every pod that has output and none yet; return the pods."""
        pods = [pod for pod in self.list_pods() if only in ("", pod.name, pod.index)]
        for pod in pods:
            if pod.has_started and pod.name not in self._processes:
                self._start_reader(pod.name, follow=follow)
        return pods

    def _start_reader(self, pod: str, *, follow: bool) -> None:
        words = ["logs", pod, "-c", self._container]
        if follow:
            words.append("--follow")
        if self._tail is not None:
            words.append(f"--tail={self._tail}")
        process = subprocess.Popen(
            self._kubectl.make_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self._kubectl.environ),
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._processes[pod] = process
        self._parts[pod] = b""
        self._selector.register(process.stdout, selectors.EVENT_READ, pod)

    def _read_once(self, seconds: float | None) -> None:
        if not self._parts:
            time.sleep(seconds or 0)
            return
        for key, _ in self._selector.select(seconds):
            stream = key.fileobj
            assert not isinstance(stream, int)
            self._read_stream(str(key.data), stream)  # type: ignore[arg-type]  # a pipe

    def _read_stream(self, pod: str, stream: BinaryIO) -> None:
        data = os.read(stream.fileno(), MAX_LINE_BYTES)
        lines = (self._parts[pod] + data).split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES or (rest and not data):
            lines.append(rest)
            rest = b""
        for line in lines:
            self._write(prefix_line(pod, line) + b"\n")
        self._parts[pod] = rest
        if not data:
            self._selector.unregister(stream)
            stream.close()
            del self._parts[pod]
            self._note_failure(pod)

    def _note_failure(self, pod: str) -> None:
        process = self._processes[pod]
        assert process.stderr is not None
        text = process.stderr.read(MAX_LINE_BYTES).decode("utf-8", "replace")
        process.stderr.close()
        if process.wait():
            lines = text.strip().splitlines() or ["kubectl logs failed"]
            self.failures[pod] = lines[-1].removeprefix("error: ")[:300]

    def _stop_readers(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait()
        self._selector.close()


def _have_all_ended(pods: list[PodState]) -> bool:
    return bool(pods) and all(pod.has_ended for pod in pods)


def prefix_line(pod: str, line: bytes) -> bytes:
    """Return a line with the pod's name, unless it has the prefix of a worker."""
    if _WORKER_PREFIX.match(line):
        return line
    return pod.encode() + b"| " + line


def read_job_status(kubectl: Kubectl, pod: str, container: str, seconds: float) -> str:
    """
    Return what ``pdrun status`` says inside a pod; empty if it cannot be asked.

    Only the pods reach the scheduler, so the question is asked there.
    """
    try:
        return kubectl.run("exec", pod, "-c", container, "--", "pdrun", "status", seconds=seconds)
    except PdrunError:
        return ""
