"""``pdrun k8s`` against a real API server, with a real kubectl and real workers in the pods."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.kube import indexed
from tests.lib.kube.kubelet import TestKubelet
from tests.lib.kube.server import KubeServer, find_programs

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if sys.argv[1:] == ["wait"]:
    Path("started-" + os.environ["RANK"]).touch()
    time.sleep(300)
if os.environ["RANK"] == "3" and sys.argv[1:]:
    raise SystemExit(int(sys.argv[1]))
"""


class Cluster:
    """A server, a kubelet, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.server = KubeServer(find_programs(), folder)
        self.folder = folder
        self.kubelet = TestKubelet(self.server.api, folder)
        (folder / "train.py").write_text(SCRIPT)

    def pdrun(self, *words: str, user: bool = False) -> subprocess.CompletedProcess[str]:
        config = self.server.user_kubeconfig if user else None
        return subprocess.run(
            [sys.executable, "-m", "pdrun", "k8s", *words],
            env=self.server.environment(config),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

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
            done = self.pdrun("status", "--json", name)
            assert done.returncode == 0, done.stderr
            state = json.loads(done.stdout)[0]
            if state["state"].startswith(word):
                pods: list[dict[str, Any]] = state["pods"]
                return pods
            if time.monotonic() > deadline:
                logs = [self.kubelet.log_of(pod["name"]) for pod in state["pods"]]
                pytest.fail(f"{word!r} not seen: {state}\n" + "\n".join(logs))
            time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    find_programs()
    made = Cluster(tmp_path_factory.mktemp("kube"))
    try:
        made.server.start()
        made.kubelet.start()
        yield made
    finally:
        made.kubelet.stop()
        made.server.stop()


OPTIONS = ("--nodes", "2", "--devices", "2", "--backend", "cpu", "--image", "i", "--grace", "5")


def test_a_job_runs_and_its_output_is_followed(cluster: Cluster) -> None:
    cluster.create(*OPTIONS, "--name", "good", "train.py")
    logs = cluster.pdrun("logs", "--follow", "good")
    assert logs.returncode == 0, logs.stderr
    for rank in range(4):
        assert f"rank {rank} of 4" in logs.stdout
    lines = [line for line in logs.stdout.splitlines() if " of 4" in line]
    assert {line[:6] for line in lines} == {"good-0", "good-1"}, logs.stdout
    assert not any("aaaaa" in line for line in lines), "a worker's line has pdrun's own prefix"
    pods = cluster.wait_for("good", "done")
    assert [pod["code"] for pod in pods] == [0, 0]
    tail = cluster.pdrun("logs", "--tail", "1", "--pod", "1", "good")
    assert len(tail.stdout.splitlines()) == 1


def test_a_failure_is_named_in_the_status(cluster: Cluster) -> None:
    cluster.create(*OPTIONS, "--name", "bad", "train.py", "7")
    pods = cluster.wait_for("bad", "failed: ")
    deadline = time.monotonic() + 30
    while any(pod["code"] is None for pod in pods) and time.monotonic() < deadline:
        pods = cluster.wait_for("bad", "failed: ")
    assert [pod["code"] for pod in pods] == [7, 7]
    text = cluster.pdrun("status", "bad").stdout
    assert "rank 3 on bad-1" in text
    assert "exit code 7" in text


def test_stop_lets_the_pods_end(cluster: Cluster) -> None:
    cluster.create(*OPTIONS, "--name", "long", "train.py", "wait")
    deadline = time.monotonic() + 90
    while not all((cluster.folder / f"started-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < deadline, cluster.kubelet.log_of("long-0-aaaaa")
        time.sleep(0.1)
    done = cluster.pdrun("stop", "long")
    assert done.returncode == 0, done.stderr
    assert "SIGTERM" in cluster.kubelet.log_of("long-0-aaaaa")
    gone = cluster.pdrun("status", "long")
    assert gone.returncode == 2
    assert "no job of pdrun called long" in gone.stderr
    for kind in ("secrets/long-token", "services/long"):
        with pytest.raises(OSError, match="404"):
            cluster.server.api.request("GET", f"/api/v1/namespaces/default/{kind}")


def test_pods_without_a_node_say_why(cluster: Cluster) -> None:
    overlay = cluster.folder / "site.yaml"
    overlay.write_text("spec: {nodeSelector: {gpu: a100}}\n")
    job = cluster.create("--image", "i", "--pod", str(overlay), "--name", "stuck", "train.py")
    pod = f"{job['metadata']['name']}-0-aaaaa"
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 node(s) didn't match node selector.",
    }
    cluster.server.api.merge(
        f"/api/v1/namespaces/default/pods/{pod}/status", {"status": {"conditions": [condition]}}
    )
    text = cluster.pdrun("status", "stuck").stdout
    assert "waiting: 0 of 1 pod running; stuck-0-aaaaa: Unschedulable: 0/1 nodes are" in text


def test_a_server_without_indexed_jobs_is_refused(cluster: Cluster) -> None:
    done = cluster.pdrun("submit", *OPTIONS, "train.py")
    assert done.returncode == 78
    assert "the server (v1.20.2" in done.stderr or "the server (v0.0.0" in done.stderr
    assert "has no indexed Jobs; Kubernetes 1.24 and later have them" in done.stderr


def test_a_kind_that_the_cluster_lacks_is_refused(cluster: Cluster) -> None:
    done = cluster.pdrun("submit", *OPTIONS, "--kind", "jobset", "train.py")
    assert done.returncode == 78
    assert "does not have jobsets.jobset.x-k8s.io; install JobSet, or use --kind job" in done.stderr


def test_what_a_user_may_not_do_is_said(cluster: Cluster) -> None:
    done = cluster.pdrun("env", user=True)
    assert done.returncode == 0, done.stderr
    assert "not allowed: create secrets" in done.stdout
    denied = cluster.pdrun("status", user=True)
    assert denied.returncode == 69
    assert "Forbidden" in denied.stderr
    assert "Traceback" not in denied.stderr


def test_an_unknown_job_is_answered_with_the_known_names(cluster: Cluster) -> None:
    cluster.create("--image", "i", "--name", "alpha", "train.py")
    done = cluster.pdrun("logs", "alpah")
    assert done.returncode == 2
    assert "did you mean 'alpha'?" in done.stderr
