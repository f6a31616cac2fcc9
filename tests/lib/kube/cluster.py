"""A server, a kubelet, and the commands of a user."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.lib.kube import indexed
from tests.lib.kube.kubelet import TestKubelet
from tests.lib.kube.server import KubeServer, find_programs
from tests.lib.script_forks import start_forked
from tests.lib.worker_processes import finish

SCRIPT = """
import os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if "PDRUN_SERVER_COUNT" in os.environ:
    print("servers:", os.environ["PDRUN_SERVER_COUNT"], flush=True)
if sys.argv[1:] == ["wait"]:
    Path("started-" + os.environ["RANK"]).touch()
    time.sleep(300)
if os.environ["RANK"] == "3" and sys.argv[1:]:
    raise SystemExit(int(sys.argv[1]))
"""


COMMAND = """
import sys
from pdrun.launcher.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
COMMAND_MODULES = (
    *("pdrun.launcher.cli.main", "pdrun.launcher.cli.commands", "pdrun.launcher.config.resolve"),
    *("pdrun.launcher.cli.clusters.k8s_jobs", "pdrun.launcher.translate.program_settings"),
    *("pdrun.launcher.k8s.logs", "pdrun.launcher.k8s.manifest", "subprocess", "yaml"),
)
"""What a command imports, a third of a second of CPU: it is forked from a process that has."""


class KubeCluster:
    """A server, a kubelet, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.server = KubeServer(find_programs(), folder)
        self.folder = folder
        self.kubelet = TestKubelet(self.server.api, folder)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "command.py").write_text(COMMAND)

    def pdrun(self, *words: str, user: bool = False) -> subprocess.CompletedProcess[str]:
        """Run ``pdrun k8s WORDS``, in a process that is forked."""
        config = self.server.user_kubeconfig if user else None
        process = start_forked(
            self.folder / "command.py",
            self.server.environment(config),
            ("k8s", *words),
            modules=COMMAND_MODULES,
        )
        code, out, err = finish(process, 120)
        return subprocess.CompletedProcess(words, code or 0, out, err)

    def find(self, kind: str, query: str = "") -> list[str]:
        """Return names of objects in ``default``; kubectl would cost 0.25 s of CPU."""
        found = self.server.api.request("GET", f"/api/v1/namespaces/default/{kind}?{query}")
        return [item["metadata"]["name"] for item in found["items"]]

    def serves(self, spec: dict[str, Any]) -> bool:
        """Return whether the server lists a defined kind's group, and answers for its objects."""
        group, request = spec["group"], self.server.api.request
        if group not in (found["name"] for found in request("GET", "/apis")["groups"]):
            return False
        path = f"/apis/{group}/{spec['versions'][0]['name']}"
        try:
            served = request("GET", path)["resources"]
            request("GET", f"{path}/{spec['names']['plural']}")
        except HTTPError:
            return False
        return spec["names"]["plural"] in (found["name"] for found in served)

    def create(self, *words: str) -> dict[str, Any]:
        """Create what ``render`` prints; return the Job with a pod per index."""
        done = self.pdrun("render", *words)
        assert done.returncode == 0, done.stderr
        plurals = {"Secret": "/api/v1/namespaces/default/secrets"}
        plurals["Service"] = "/api/v1/namespaces/default/services"
        plurals["Job"] = "/apis/batch/v1/namespaces/default/jobs"
        created: dict[str, Any] = {}
        for body in yaml.safe_load_all(done.stdout):
            created[body["kind"]] = self.server.api.request("POST", plurals[body["kind"]], body)
            asked = body
        # the server drops the fields that it does not know
        job = {**asked, "metadata": created["Job"]["metadata"]}
        indexed.create_pods(self.server.api, job)
        return job

    def wait_for(self, name: str, word: str, seconds: float = 90.0) -> list[dict[str, Any]]:
        """Wait until the state of a job begins with a word; return its pods."""
        deadline = time.monotonic() + seconds
        while True:
            before = self._read_phases()
            done = self.pdrun("status", "--json", name)
            assert done.returncode == 0, done.stderr
            state = json.loads(done.stdout)[0]
            if state["state"].startswith(word):
                pods: list[dict[str, Any]] = state["pods"]
                return pods
            if time.monotonic() > deadline:
                logs = [self.kubelet.log_of(pod["name"]) for pod in state["pods"]]
                pytest.fail(f"{word!r} not seen: {state}\n" + "\n".join(logs))
            soon = time.monotonic() + 3  # a command costs a third of a second of CPU
            while self._read_phases() == before and time.monotonic() < soon:
                time.sleep(0.1)

    def _read_phases(self) -> list[Any]:
        """Return the phase of each pod."""
        items = self.server.api.request("GET", "/api/v1/namespaces/default/pods")["items"]
        return [(pod["metadata"]["name"], pod["status"].get("phase")) for pod in items]

    def kubectl(self, *words: str, as_operator: bool = False, stdin: str = "") -> str:
        """Run kubectl; return its output, with its error if it failed."""
        config = self.server.operator_kubeconfig if as_operator else None
        done = subprocess.run(
            [self.server.kubectl, *words],
            env=self.server.environment(config),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + (done.stderr if done.returncode else "")

    def wait_until(self, question: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
        """Wait until a question is answered with yes."""
        deadline = time.monotonic() + seconds
        while not question():
            if time.monotonic() > deadline:
                logs = [
                    path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")
                ]
                pytest.fail(f"not seen: {what}\n" + "\n".join(logs[-6:]))
            time.sleep(0.1)
