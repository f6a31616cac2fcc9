"""``pdrun k8s`` against a real API server, with a real kubectl and real workers in the pods."""

from __future__ import annotations

import time

import pytest

from tests.lib.kube.cluster import KubeCluster

pytestmark = pytest.mark.timeout(300)

OPTIONS = ("--nodes", "2", "--devices", "2", "--backend", "cpu", "--image", "i", "--grace", "5")


def test_a_job_runs_and_its_output_is_followed(kube: KubeCluster) -> None:
    kube.create(*OPTIONS, "--name", "good", "train.py")
    logs = kube.pdrun("logs", "--follow", "good")
    assert logs.returncode == 0, logs.stderr
    for rank in range(4):
        assert f"rank {rank} of 4" in logs.stdout
    lines = [line for line in logs.stdout.splitlines() if " of 4" in line]
    assert {line[:6] for line in lines} == {"good-0", "good-1"}, logs.stdout
    assert not any("aaaaa" in line for line in lines), "a worker's line has pdrun's own prefix"
    pods = kube.wait_for("good", "done")
    assert [pod["code"] for pod in pods] == [0, 0]
    tail = kube.pdrun("logs", "--tail", "1", "--pod", "1", "good")
    assert len(tail.stdout.splitlines()) == 1


def test_a_failure_is_named_in_the_status(kube: KubeCluster) -> None:
    kube.create(*OPTIONS, "--name", "bad", "train.py", "7")
    pods = kube.wait_for("bad", "failed: ")
    deadline = time.monotonic() + 30
    while any(pod["code"] is None for pod in pods) and time.monotonic() < deadline:
        pods = kube.wait_for("bad", "failed: ")
    assert [pod["code"] for pod in pods] == [7, 7]
    text = kube.pdrun("status", "bad").stdout
    assert "rank 3 on bad-1" in text
    assert "exit code 7" in text


def test_stop_lets_the_pods_end(kube: KubeCluster) -> None:
    started = [kube.folder / f"started-{rank}" for rank in range(4)]
    for path in started:
        path.unlink(missing_ok=True)  # of another test's job
    kube.create(*OPTIONS, "--name", "long", "train.py", "wait")
    deadline = time.monotonic() + 90
    while not all(path.exists() for path in started):
        assert time.monotonic() < deadline, kube.kubelet.log_of("long-0-aaaaa")
        time.sleep(0.1)
    done = kube.pdrun("stop", "long")
    assert done.returncode == 0, done.stderr
    kube.wait_until(
        lambda: "SIGTERM" in kube.kubelet.log_of("long-0-aaaaa"), "a line about SIGTERM"
    )
    gone = kube.pdrun("status", "long")
    assert gone.returncode == 2
    assert "no job of pdrun called long" in gone.stderr
    for kind in ("secrets/long-token", "services/long"):
        with pytest.raises(OSError, match="404"):
            kube.server.api.request("GET", f"/api/v1/namespaces/default/{kind}")


def test_pods_without_a_node_say_why(kube: KubeCluster) -> None:
    overlay = kube.folder / "site.yaml"
    overlay.write_text("spec: {nodeSelector: {gpu: a100}}\n")
    job = kube.create("--image", "i", "--pod", str(overlay), "--name", "stuck", "train.py")
    pod = f"{job['metadata']['name']}-0-aaaaa"
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 node(s) didn't match node selector.",
    }
    kube.server.api.merge(
        f"/api/v1/namespaces/default/pods/{pod}/status", {"status": {"conditions": [condition]}}
    )
    text = kube.pdrun("status", "stuck").stdout
    assert "waiting: 0 of 1 pod running; stuck-0-aaaaa: Unschedulable: 0/1 nodes are" in text


def test_a_server_without_indexed_jobs_is_refused(kube: KubeCluster) -> None:
    done = kube.pdrun("submit", *OPTIONS, "train.py")
    assert done.returncode == 78
    assert "the server (v1.20.2" in done.stderr or "the server (v0.0.0" in done.stderr
    assert "has no indexed Jobs; Kubernetes 1.24 and later have them" in done.stderr


def test_a_kind_that_the_cluster_lacks_is_refused(kube: KubeCluster) -> None:
    done = kube.pdrun("submit", *OPTIONS, "--kind", "jobset", "train.py")
    assert done.returncode == 78
    assert "does not have jobsets.jobset.x-k8s.io; install JobSet, or use --kind job" in done.stderr


def test_what_a_user_may_not_do_is_said(kube: KubeCluster) -> None:
    done = kube.pdrun("env", user=True)
    assert done.returncode == 0, done.stderr
    assert "not allowed: create secrets" in done.stdout
    denied = kube.pdrun("status", user=True)
    assert denied.returncode == 69
    assert "Forbidden" in denied.stderr
    assert "Traceback" not in denied.stderr


def test_an_unknown_job_is_answered_with_the_known_names(kube: KubeCluster) -> None:
    kube.create("--image", "i", "--name", "alpha", "train.py")
    done = kube.pdrun("logs", "alpah")
    assert done.returncode == 2
    assert "did you mean 'alpha'?" in done.stderr
