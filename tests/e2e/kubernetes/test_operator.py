"""The operator against a real API server: its definition, its writes, its rights, its death."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdrun.errors import PdrunError, RendezvousError
from pdrun.launcher.k8s.operator import crd
from pdrun.launcher.k8s.operator.api import KubernetesApi
from pdrun.launcher.k8s.operator.lease import OperatorLease
from pdrun.launcher.k8s.operator.loop import OperatorLoop
from pdrun.launcher.k8s.pod import Manifest
from tests.lib.kube.cluster import KubeCluster
from tests.lib.kube.operator import (
    JOBS,
    OPTIONS,
    delete_jobs,
    make_api,
    make_loop,
    pods_of,
    post_job,
    read,
    wait_for_state,
)

pytestmark = pytest.mark.timeout(300)


def test_mistakes_are_refused_by_the_definition(installed: KubeCluster) -> None:
    good = {"image": "i", "run": ["a.py"]}
    for change, words in (
        ({"nodes": "many"}, ("spec.nodes", "integer")),
        ({"nodes": 0}, ("spec.nodes", "greater than or equal to 1")),
        ({"run": []}, ("spec.run", "at least 1 items")),
        ({"image": None}, ("spec.image",)),
    ):
        body = {"apiVersion": "pdrun.dev/v1", "kind": "PdJob", "metadata": {"name": "wrong"}}
        text = json.dumps({**body, "spec": {**good, **change}})
        out = installed.kubectl("create", "--validate=false", "-f", "-", stdin=text)
        assert all(word in out for word in words), out


def test_submit_logs_status_and_deletion(installed: KubeCluster, operator: OperatorLoop) -> None:
    done = installed.pdrun("submit", *OPTIONS, "--nodes", "2", "--name", "op-ok", "train.py")
    assert (done.returncode, done.stdout) == (0, "op-ok\n"), done.stderr
    logs = installed.pdrun("logs", "--follow", "op-ok")
    assert all(f"rank {rank} of 4" in logs.stdout for rank in range(4)), logs.stdout
    status = wait_for_state(installed, "op-ok", "Succeeded")["status"]
    assert status["code"] == 0
    table = installed.kubectl("get", "pdj", "op-ok")
    assert table.split()[:5] == ["NAME", "STATE", "NODES", "WANTED", "CODE"]
    assert installed.pdrun("stop", "op-ok").returncode == 0
    assert not pods_of(installed, "op-ok")
    query = "labelSelector=pdrun.dev/job=op-ok"
    installed.wait_until(
        lambda: not (installed.find("secrets", query) or installed.find("services", query)),
        "the garbage collector took Secret and Service",
    )


def test_parameter_servers_run_beside_the_workers(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    words = ("--nodes", "2", "--servers", "1/node", "--name", "op-served", "train.py")
    done = installed.pdrun("submit", *OPTIONS, *words)
    assert done.returncode == 0, done.stderr
    wait_for_state(installed, "op-served", "Succeeded")
    assert sorted(pods_of(installed, "op-served")) == ["op-served-0", "op-served-1"]
    logs = [installed.kubelet.log_of(f"op-served-{index}") for index in range(2)]
    assert [log.count("servers: 2\n") for log in logs] == [2, 2], logs
    delete_jobs(installed, "op-served")


def test_a_failure_has_code_and_cause(installed: KubeCluster, operator: OperatorLoop) -> None:
    installed.pdrun("submit", *OPTIONS, "--nodes", "2", "--name", "op-bad", "train.py", "7")
    status = wait_for_state(installed, "op-bad", "Failed")["status"]
    assert status["code"] == 7
    assert "rank 3 on op-bad-1" in status["reason"]
    text = installed.pdrun("status", "op-bad").stdout
    assert text.startswith("op-bad: failed: ") and "exit code 7" in text


def test_a_wrong_command_line_is_named_in_the_status(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    body: Manifest = {
        "apiVersion": "pdrun.dev/v1",
        "kind": "PdJob",
        "metadata": {"name": "op-typo"},
    }
    body["spec"] = {"image": "i", "run": ["--max-restarts", "x", "a.py"]}
    installed.server.api.request("POST", JOBS, body)
    status = wait_for_state(installed, "op-typo", "Invalid")["status"]
    assert status["reason"].startswith("--max-restarts: ")
    assert not pods_of(installed, "op-typo")


class DyingApi(KubernetesApi):
    """Dies at a write: the operator is killed there."""

    writes_left = 0

    def _request(
        self, method: str, kind: str, name: str, body: Manifest | None = None, query: str = ""
    ) -> Manifest:
        if method != "GET":
            if self.writes_left == 0:
                raise RendezvousError("killed", where=f"{method} {kind}")
            self.writes_left -= 1
        return super()._request(method, kind, name, body, query)


def test_an_operator_killed_at_each_write_leaves_nothing_half_done(
    installed: KubeCluster,
) -> None:
    nowhere = {"spec": {"nodeSelector": {"gpu": "none"}}}  # what is in the pods is no matter
    names = [f"killed-{count}" for count in range(6)]
    for count, name in enumerate(names):
        post_job(installed, name, "train.py", nodes=2, pod=nowhere)
        dying = make_api(installed, DyingApi)
        assert isinstance(dying, DyingApi)
        dying.writes_left = count
        job = read(installed, name)
        try:
            make_loop(dying).reconcile_job(job, [])
        except PdrunError:
            pass
        loop = make_loop(make_api(installed))
        for _ in range(2):
            pods = list(pods_of(installed, name).values())
            loop.reconcile_job(read(installed, name), pods)
        assert sorted(pods_of(installed, name)) == [f"{name}-0", f"{name}-1"]
    delete_jobs(installed, *names)


def test_scale_while_training_goes_on(installed: KubeCluster, operator: OperatorLoop) -> None:
    words = (
        "--nodes",
        "1:3",
        "--gather",
        "1",
        "--grow",
        "1",
        "--name",
        "op-grow",
        "train.py",
        "wait",
    )
    done = installed.pdrun("submit", *OPTIONS, *words)
    assert done.returncode == 0, done.stderr
    kube = installed
    assert "scaled" in kube.kubectl("scale", "pdj/op-grow", "--replicas=2")
    kube.wait_until(
        lambda: sorted(pods_of(kube, "op-grow")) == ["op-grow-0", "op-grow-1"], "two pods"
    )
    wait_for_state(kube, "op-grow", "Running")

    def has_world(size: int) -> bool:
        return f"of {size}" in kube.kubelet.log_of("op-grow-0")

    kube.wait_until(lambda: has_world(4), "two nodes train")
    kube.kubectl("scale", "pdj/op-grow", "--replicas=3")
    kube.wait_until(lambda: has_world(6), "three nodes train")
    count = kube.kubelet.log_of("op-grow-0").count("of 4")
    kube.kubectl("scale", "pdj/op-grow", "--replicas=2")
    kube.wait_until(
        lambda: sorted(pods_of(kube, "op-grow")) == ["op-grow-0", "op-grow-1"], "two pods again"
    )
    kube.wait_until(
        lambda: kube.kubelet.log_of("op-grow-0").count("of 4") > count, "two nodes again"
    )
    status = read(kube, "op-grow")["status"]
    assert status["state"] == "Running" and "lostPods" not in status
    # suspend
    kube.server.api.merge(f"{JOBS}/op-grow", {"spec": {"suspend": True}})
    wait_for_state(kube, "op-grow", "Suspended")
    kube.wait_until(lambda: not pods_of(kube, "op-grow"), "no pods")
    delete_jobs(kube, "op-grow")


def test_two_operators_and_the_lease(installed: KubeCluster) -> None:
    api = make_api(installed)
    first, second = OperatorLease(api, "first"), OperatorLease(api, "second")
    never = threading.Event()
    first.acquire(never, print)
    never.set()
    lines: list[str] = []
    second.acquire(never, lines.append)  # `never` is set: it asks no more than once
    lease: dict[str, Any] = api.get("Lease", crd.OPERATOR_NAME) or {}
    assert lease["spec"]["holderIdentity"] == "first"
    lease["spec"]["holderIdentity"] = "third"
    assert api.replace(lease)
    with pytest.raises(PdrunError, match="another operator has taken the lease"):
        first._renewed = 0.0
        first.renew_if_due()


def test_the_command_runs_with_the_login_of_kubectl(installed: KubeCluster, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdrun", "k8s", "operator", "run", "--proxy"],
            env=installed.server.environment(),
            stdout=stream,
            stderr=stream,
        )
    try:
        installed.kubectl("delete", "lease", crd.OPERATOR_NAME)
        installed.pdrun("submit", *OPTIONS, "--nodes", "1", "--name", "op-short", "train.py")
        wait_for_state(installed, "op-short", "Succeeded")
    finally:
        process.terminate()
        code = process.wait(30)
    assert code == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def test_rights_are_narrow(installed: KubeCluster) -> None:
    wanted: dict[tuple[str, ...], str] = {
        ("list", "secrets"): "no",
        ("get", "secrets"): "yes",
        ("delete", "secrets"): "no",
        ("create", "pods"): "yes",
        ("create", "pods", "--subresource=exec"): "no",
        ("create", "pdjobs"): "no",
        ("patch", "pdjobs", "--subresource=status"): "yes",
    }
    found: dict[tuple[str, ...], str] = {}
    for words in wanted:
        out = installed.kubectl("auth", "can-i", *words, as_operator=True)
        found[words] = "yes" if "yes" in out.split() else "no"
    assert found == wanted
