"""
A kubelet for tests: runs each pod's first container as a process of this machine.

A pod has a host name and an /etc/hosts of its own (mount and UTS namespaces), and the network of
this machine. Its status, exit code, termination message and log are those of its process.
"""

from __future__ import annotations

import base64
import http.server
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.lib.kube.api import ApiClient, Item

NODE = "test-node"
POLL_SECONDS = 0.1
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def now() -> str:
    """Return the time in Kubernetes' format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_own_address() -> str:
    """Return an address of this machine, which all pods share; loopback if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_running(pod: Item) -> bool:
    """Return whether the API server takes a pod for running."""
    return bool(pod["status"].get("phase") == "Running")


class TestKubelet:
    """Runs the pods of the namespace ``default``."""

    __test__ = False

    def __init__(self, api: ApiClient, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: set[str] = set()
        self._ended = threading.Event()
        self._server = self._start_log_server()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._lost: set[str] = set()
        """Pods of a node that is lost, by uid: nothing is heard of them."""

    def start(self) -> None:
        """Register the node; begin to run pods."""
        self._api.request(
            "POST",
            "/api/v1/nodes",
            {"metadata": {"name": NODE}, "apiVersion": "v1", "kind": "Node"},
        )
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_port}},
        }
        self._api.merge(f"/api/v1/nodes/{NODE}/status", {"status": status})
        self._thread.start()

    def stop(self) -> None:
        """End all pods and threads."""
        self._ended.set()
        self._thread.join(20)
        self._server.shutdown()
        self._server.server_close()
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_of(self, pod: str) -> str:
        """Return the output of a pod; nothing before it has begun."""
        with suppress(FileNotFoundError):
            return (self._folder / f"{pod}.log").read_text(errors="replace")
        return ""

    def lose(self, pod: str) -> None:
        """Lose the node of a pod: its processes stand still, and its kubelet is silent."""
        found = self._api.request("GET", f"/api/v1/namespaces/default/pods/{pod}")
        uid = found["metadata"]["uid"]
        self._lost.add(uid)
        os.kill(self._processes[uid].pid, signal.SIGSTOP)

    def kill(self, pod: str) -> None:
        """Kill the processes of a pod, as the kernel does when memory is short."""
        found = self._api.request("GET", f"/api/v1/namespaces/default/pods/{pod}")
        os.killpg(self._processes[found["metadata"]["uid"]].pid, signal.SIGKILL)

    # The loop
    # ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            with suppress(OSError, urllib.error.URLError):
                for pod in self._api.request("GET", "/api/v1/namespaces/default/pods")["items"]:
                    self._handle(pod)

    def _handle(self, pod: Item) -> None:
        uid = pod["metadata"]["uid"]
        process = self._processes.get(uid)
        if uid in self._lost:
            return
        if pod["metadata"].get("deletionTimestamp"):
            self._end(pod, process)
        elif uid not in self._seen and pod["status"].get("phase") == "Pending":
            if pod["spec"].get("nodeSelector"):
                return  # no node has labels: it stays unscheduled
            self._seen.add(uid)
            self._run(pod)
        elif process is not None and process.poll() is not None and is_running(pod):
            self._report_end(pod, process)

    def _end(self, pod: Item, process: subprocess.Popen[bytes] | None) -> None:
        """SIGTERM, SIGKILL after the grace time, then the object goes."""
        name = pod["metadata"]["name"]
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                stamp = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])
                is_late = datetime.now(UTC) > stamp
                if is_late:
                    os.killpg(process.pid, signal.SIGKILL)
                elif not getattr(process, "was_told", False):
                    process.was_told = True  # type: ignore[attr-defined]
                    os.kill(process.pid, signal.SIGTERM)
            return
        if process is not None and is_running(pod):
            self._report_end(pod, process)
        self._api.request(
            "DELETE",
            f"/api/v1/namespaces/default/pods/{name}",
            {"gracePeriodSeconds": 0, "kind": "DeleteOptions", "apiVersion": "v1"},
        )

    def _run(self, pod: Item) -> None:
        name = pod["metadata"]["name"]
        spec = pod["spec"]
        container = spec["containers"][0]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"kind": "Node", "name": NODE, "apiVersion": "v1"},
        }
        self._api.request("POST", f"/api/v1/namespaces/default/pods/{name}/binding", binding)
        hostname = spec.get("hostname") or name
        hosts = self._folder / f"{name}.hosts"
        subdomain = spec.get("subdomain", "")
        hosts.write_text(self._make_hosts(hostname, subdomain))
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--uts", "--", "sh", "-c", _ENTER, "sh"),
                    *(hostname, str(hosts), *container["command"], *container.get("args", [])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=self._make_environment(pod, container, hostname),
                start_new_session=True,
            )
        self._processes[pod["metadata"]["uid"]] = process
        running = {"running": {"startedAt": now()}}
        self._report(pod, "Running", running, ready=True)

    def _make_hosts(self, hostname: str, subdomain: str) -> str:
        lines, own = ["127.0.0.1 localhost"], find_own_address()
        if subdomain:
            job = hostname.rpartition("-")[0]
            names = [hostname, *(f"{job}-{index}" for index in range(8)), f"{job}-scheduler"]
            for one in dict.fromkeys(names):
                domain = f"{one}.{subdomain}"
                lines.append(f"{own} {domain}.default.svc.cluster.local {domain} {one}")
        return "\n".join(lines) + "\n"

    def _make_environment(self, pod: Item, container: Item, hostname: str) -> dict[str, str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name != "KUBECONFIG" and not name.startswith("PDRUN_")
        }
        folder = str(Path(sys.executable).parent)
        environ["PATH"] = f"{folder}{os.pathsep}{environ['PATH']}"
        environ |= {"HOSTNAME": hostname, "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        environ["PDRUN_TERMINATION_LOG"] = str(self._message_file(pod))
        for variable in container.get("env", []):
            environ[variable["name"]] = self._value_of(pod, variable)
        return environ

    def _value_of(self, pod: Item, variable: Item) -> str:
        if "value" in variable:
            return str(variable["value"])
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            one = source["secretKeyRef"]
            path = f"/api/v1/namespaces/default/secrets/{one['name']}"
            return base64.b64decode(self._api.request("GET", path)["data"][one["key"]]).decode()
        part: Any = pod
        for key in source.get("fieldRef", {}).get("fieldPath", "").split("."):
            part = part.get(key, {})
        return part if isinstance(part, str) else ""

    def _message_file(self, pod: Item) -> Path:
        return self._folder / f"{pod['metadata']['name']}.message"

    def _report_end(self, pod: Item, process: subprocess.Popen[bytes]) -> None:
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        ended: Item = {"exitCode": code, "finishedAt": now()}
        ended["reason"] = "Completed" if code == 0 else "Error"
        with suppress(OSError):
            ended["message"] = self._message_file(pod).read_text()
        phase = "Succeeded" if code == 0 else "Failed"
        self._report(pod, phase, {"terminated": ended}, ready=False)

    def _report(self, pod: Item, phase: str, state: Item, *, ready: bool) -> None:
        container = pod["spec"]["containers"][0]
        status = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "startTime": pod["status"].get("startTime") or now(),
            "containerStatuses": [
                {
                    "name": container["name"],
                    "ready": ready,
                    "restartCount": 0,
                    "image": container["image"],
                    "imageID": "",
                    "state": state,
                }
            ],
        }
        name = pod["metadata"]["name"]
        with suppress(urllib.error.HTTPError):  # it may have gone
            self._api.merge(f"/api/v1/namespaces/default/pods/{name}/status", {"status": status})

    # Logs, as `kubectl logs` asks for them through the API server
    # ----------------------------------------------------------------------------------------------

    def _start_log_server(self) -> http.server.ThreadingHTTPServer:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.serve_log(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        certificate = self._folder / "kubelet.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=kubelet", "-keyout", certificate, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        text = certificate.read_text()
        if "CERTIFICATE" not in text or "PRIVATE KEY" not in text:
            raise RuntimeError("openssl wrote no certificate")
        context.load_cert_chain(certificate)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def serve_log(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answer ``/containerLogs/NAMESPACE/POD/CONTAINER?follow=true&tailLines=N``."""
        url = urllib.parse.urlsplit(handler.path)
        query = urllib.parse.parse_qs(url.query)
        pod = url.path.split("/")[3]
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        with (self._folder / f"{pod}.log").open("rb") as log, suppress(OSError):
            if "tailLines" in query:
                count = int(query["tailLines"][0])
                lines = log.read().splitlines(keepends=True)
                handler.wfile.write(b"".join(lines[len(lines) - count :] if count else []))
            while not self._ended.is_set():
                has_ended = self._has_ended(pod)
                data = log.read()
                handler.wfile.write(data)
                handler.wfile.flush()
                if "follow" not in query or (has_ended and not data):
                    return
                time.sleep(POLL_SECONDS / 2)

    def _has_ended(self, pod: str) -> bool:
        try:
            found = self._api.request("GET", f"/api/v1/namespaces/default/pods/{pod}")
        except (OSError, urllib.error.URLError):
            return True
        return found["status"].get("phase") in ("Succeeded", "Failed")
