"""A real API server on loopback, with its own etcd and controller manager."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.lib.kube.api import ApiClient
from tests.lib.ports import free_port

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
START_SECONDS = 200.0
ADMIN_TOKEN = "admin-token"
USER_TOKEN = "user-token"
"""Of the user alice, who has no rights."""
OPERATOR_TOKEN = "operator-token"
"""Of the user oscar, who has the rights of RBAC: those of the operator's role, once it is there."""
_TOKENS = f"""\
{ADMIN_TOKEN},admin,1,"system:masters"
{USER_TOKEN},alice,2,""
{OPERATOR_TOKEN},oscar,3,""
"""
_CONFIG = """\
apiVersion: v1
kind: Config
current-context: {user}
contexts: [{{name: {user}, context: {{cluster: test, user: {user}, namespace: default}}}}]
clusters: [{{name: test, cluster: {{server: "{url}", insecure-skip-tls-verify: true}}}}]
users: [{{name: {user}, user: {{token: {token}}}}}]
"""


def find_programs() -> Path:
    """Return the folder of the programs, or skip the test."""
    folder = Path(os.environ.get("PDRUN_TEST_KUBE") or Path(__file__).parents[3] / "build/kube")
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not in {folder}: scripts/kube {folder} makes them")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("pods need root: each has a host name and /etc/hosts of its own")
    return folder


class KubeServer:
    """etcd, kube-apiserver and kube-controller-manager, as processes of their own."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = f"https://127.0.0.1:{free_port()}"
        self.api = ApiClient(self.url, ADMIN_TOKEN)
        self.kubeconfig = self._write_config("admin", ADMIN_TOKEN)
        self.user_kubeconfig = self._write_config("alice", USER_TOKEN)
        self.operator_kubeconfig = self._write_config("oscar", OPERATOR_TOKEN)
        self.kubectl = str(programs / "kubectl")

    def _write_config(self, user: str, token: str) -> Path:
        path = self._folder / f"{user}.yaml"
        path.write_text(_CONFIG.format(url=self.url, user=user, token=token))
        return path

    def start(self) -> None:
        """Start all three; wait until the API server answers."""
        folder = self._folder
        key = folder / "service-account.key"
        (folder / "tokens.csv").write_text(_TOKENS)
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._spawn(
            *("etcd", "--data-dir", str(folder / "data"), "--unsafe-no-fsync"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )
        self._spawn(
            *("kube-apiserver", "--etcd-servers", client, "--bind-address", "127.0.0.1"),
            *("--advertise-address", "192.0.2.2", "--secure-port", self.url.rpartition(":")[2]),
            *("--cert-dir", str(folder / "certificates")),
            *("--service-account-issuer", "https://kubernetes.default"),
            *("--service-account-signing-key-file", str(key)),
            *("--service-account-key-file", str(key)),
            *("--authorization-mode", "RBAC", "--token-auth-file", str(folder / "tokens.csv")),
            *("--service-cluster-ip-range", "10.96.0.0/24"),
            *("--kubelet-preferred-address-types", "InternalIP"),
            *("--disable-admission-plugins", "ServiceAccount"),
        )
        deadline = time.monotonic() + START_SECONDS
        while not self.api.is_ready():
            if time.monotonic() > deadline or self._processes[1].poll() is not None:
                log = (folder / "kube-apiserver.log").read_text(errors="replace")
                pytest.fail(f"the API server did not start:\n{log[-3000:]}")
            time.sleep(0.1)
        self._spawn(
            *("kube-controller-manager", "--kubeconfig", str(self.kubeconfig)),
            *("--use-service-account-credentials=false", "--leader-elect=false"),
            *("--controllers", "garbagecollector,namespace", "--bind-address", "127.0.0.1"),
            *("--port", "0", "--secure-port", str(free_port())),
            *("--cert-dir", str(folder / "manager")),
        )

    def _spawn(self, program: str, *words: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            command = [str(self._programs / program), *words]
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def stop(self) -> None:
        """End all processes."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def environment(self, kubeconfig: Path | None = None) -> dict[str, str]:
        """Return an environment in which kubectl reaches this server."""
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig or self.kubeconfig)}
