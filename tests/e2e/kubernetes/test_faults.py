"""The operator against a real API server: nodes that are lost, and writes of others."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.k8s.operator import crd
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
PODS = "/api/v1/namespaces/default/pods"


def submit(kube: KubeCluster, name: str, *words: str) -> None:
    done = kube.pdrun("submit", *OPTIONS, "--name", name, *words)
    assert done.returncode == 0, done.stderr


def mark_unknown(kube: KubeCluster, pod: str) -> None:
    """Write what the node controller writes when a kubelet has been silent."""
    ready = {"type": "Ready", "status": "False"}
    status: dict[str, Any] = {"phase": "Unknown", "reason": "NodeLost", "conditions": [ready]}
    kube.server.api.merge(f"{PODS}/{pod}/status", {"status": status})


def count_worlds(kube: KubeCluster, pod: str, size: int) -> int:
    return kube.kubelet.log_of(pod).count(f"rank 0 of {size}\n")


def test_an_elastic_job_goes_on_without_a_lost_node(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    kube = installed
    words = ("--nodes", "1:2", "--gather", "1", "--grow", "1", "--max-restarts", "3")
    submit(kube, "op-lost", *words, "train.py", "wait")
    kube.wait_until(lambda: count_worlds(kube, "op-lost-0", 4) > 0, "two nodes train")
    wait_for_state(kube, "op-lost", "Running")
    uid = pods_of(kube, "op-lost")["op-lost-1"]["metadata"]["uid"]
    kube.kubelet.lose("op-lost-1")
    mark_unknown(kube, "op-lost-1")
    kube.wait_until(lambda: read(kube, "op-lost")["status"]["nodes"] == 1, "one node is counted")
    kube.wait_until(lambda: count_worlds(kube, "op-lost-0", 2) > 0, "the other node goes on")
    # The pod may still run: no second one of its index before its object is gone.
    kube.server.api.request("DELETE", f"{PODS}/op-lost-1")
    loop = make_loop(make_api(kube))
    loop.reconcile_all()
    pods = pods_of(kube, "op-lost")
    assert sorted(pods) == ["op-lost-0", "op-lost-1"]
    assert pods["op-lost-1"]["metadata"]["uid"] == uid
    assert pods["op-lost-1"]["metadata"]["deletionTimestamp"]
    assert read(kube, "op-lost")["status"]["state"] == "Running"
    # The garbage collector of pods takes it, or an administrator.
    known = count_worlds(kube, "op-lost-0", 4)
    kube.kubectl("delete", "pod", "op-lost-1", "--grace-period=0", "--force")
    kube.wait_until(lambda: count_worlds(kube, "op-lost-0", 4) > known, "two nodes train again")
    assert pods_of(kube, "op-lost")["op-lost-1"]["metadata"]["uid"] != uid
    delete_jobs(kube, "op-lost")


def test_a_pod_made_again_at_once_waits_for_the_silent_one(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    """Its node is silent, not known to be lost: its workers may still run for some seconds."""
    kube = installed
    words = ("--nodes", "1:2", "--gather", "1", "--grow", "1", "--max-restarts", "3")
    submit(kube, "op-soon", *words, "train.py", "wait")
    kube.wait_until(lambda: count_worlds(kube, "op-soon-0", 4) == 1, "two nodes train")
    kube.kubelet.lose("op-soon-1")
    kube.kubectl("delete", "pod", "op-soon-1", "--grace-period=0", "--force")
    kube.wait_until(
        lambda: "an earlier pod of this name is still" in kube.kubelet.log_of("op-soon-1"),
        "the new pod waits",
    )
    assert count_worlds(kube, "op-soon-0", 2) == 0, "the earlier pod is not given up yet"
    kube.wait_until(lambda: count_worlds(kube, "op-soon-0", 4) == 2, "two nodes train again")
    lost = [line for line in kube.kubelet.log_of("op-soon-0").splitlines() if "lost" in line]
    assert len(lost) == 1 and "op-soon-1" in lost[0], lost
    status = wait_for_state(kube, "op-soon", "Running")["status"]
    assert (status["nodes"], status.get("lostPods", 0)) == (2, 0)
    delete_jobs(kube, "op-soon")


def test_a_fixed_job_ends_with_the_name_of_the_lost_node(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    kube = installed
    post_job(kube, "op-gone", "train.py", "wait", nodes=2)
    kube.wait_until(lambda: count_worlds(kube, "op-gone-0", 4) > 0, "two nodes train")
    kube.kubelet.lose("op-gone-1")
    mark_unknown(kube, "op-gone-1")
    status = wait_for_state(kube, "op-gone", "Failed")["status"]
    assert status["code"] == 69
    assert "op-gone-1" in status["reason"]
    assert len(pods_of(kube, "op-gone")) == 2, "no pod is made in its place"


def test_a_lost_scheduler_is_made_again_and_the_workers_run_on(
    installed: KubeCluster, operator: OperatorLoop
) -> None:
    kube = installed
    claim = f"journals:{kube.folder}/journals"
    words = ("--nodes", "2", "--scheduler-pod", claim, "--max-restarts", "1")
    submit(kube, "op-apart", *words, "train.py", "wait")
    kube.wait_until(lambda: count_worlds(kube, "op-apart-0", 4) > 0, "two nodes train")
    wait_for_state(kube, "op-apart", "Running")
    pods = pods_of(kube, "op-apart")
    assert sorted(pods) == ["op-apart-0", "op-apart-1", "op-apart-scheduler"]
    uid = pods["op-apart-scheduler"]["metadata"]["uid"]
    kube.kubelet.kill("op-apart-scheduler")

    def is_back() -> bool:
        pod = pods_of(kube, "op-apart").get("op-apart-scheduler")
        is_new = pod is not None and pod["metadata"]["uid"] != uid
        return is_new and "resuming from" in kube.kubelet.log_of("op-apart-scheduler")

    kube.wait_until(is_back, "the scheduler continues from its journal")
    status = read(kube, "op-apart")["status"]
    assert (status["state"], status["nodes"], status["lostSchedulers"]) == ("Running", 2, 1)
    assert count_worlds(kube, "op-apart-0", 4) == 1, "the workers were not restarted"
    # Node 0 is like any other: a job of fixed size waits for the pod in its place.
    uid = pods["op-apart-0"]["metadata"]["uid"]
    kube.kubelet.kill("op-apart-0")
    kube.wait_until(
        lambda: (
            pods_of(kube, "op-apart").get("op-apart-0", pods["op-apart-0"])["metadata"]["uid"]
            != uid
            and count_worlds(kube, "op-apart-0", 4) == 1
        ),
        "another pod is node 0",
    )
    status = wait_for_state(kube, "op-apart", "Running")["status"]
    assert status["lostPods"] == 1
    delete_jobs(kube, "op-apart")


def test_a_status_derived_from_an_older_job_is_not_written(installed: KubeCluster) -> None:
    kube = installed
    submit(kube, "stale", "--nodes", "1:2", "train.py", "wait")
    lines: list[str] = []
    loop = make_loop(make_api(kube), lines)
    old = read(kube, "stale")
    kube.server.api.merge(f"{JOBS}/stale", {"spec": {"nodes": 1}})
    loop.reconcile_job(old, [])
    assert "status" not in read(kube, "stale")
    assert loop._queue.get_nowait() == "stale", "it is derived once more"
    pods = pods_of(kube, "stale")
    is_running = any(pod["status"].get("phase") == "Running" for pod in pods.values())
    loop.reconcile_job(read(kube, "stale"), list(pods.values()))
    job = read(kube, "stale")
    assert job["status"]["observedGeneration"] == job["metadata"]["generation"] == 2
    state = "Running" if is_running else "Pending"  # a slow test has running pods by now
    assert lines == ["stale: deleting pod stale-1", f"stale: {state}"]
    delete_jobs(kube, "stale")


def test_fields_that_another_manager_has_written(installed: KubeCluster) -> None:
    """A repository's tool and an autoscaler want different sizes: the server says so."""
    kube = installed
    spec = {"image": "i", "run": ["train.py"], "nodes": 1, "minNodes": 1, "maxNodes": 3}
    body: Manifest = {"apiVersion": "pdrun.dev/v1", "kind": "PdJob", "spec": spec}
    body["metadata"] = {"name": "managed"}
    words = ("apply", "--server-side", "--field-manager=gitops", "-f", "-")
    assert "serverside-applied" in kube.kubectl(*words, stdin=json.dumps(body))
    loop = make_loop(make_api(kube))
    loop.reconcile_job(read(kube, "managed"), [])
    change = json.dumps({"spec": {"nodes": 2}})
    patch = ("patch", "pdj", "managed", "--type=merge", "--field-manager=autoscaler", "-p", change)
    assert "patched" in kube.kubectl(*patch)
    refused = kube.kubectl(*words, stdin=json.dumps(body))
    assert "conflict" in refused and ".spec.nodes" in refused
    # The operator writes no field of the spec, so its status is in nobody's way.
    spec["nodes"] = 2
    assert "serverside-applied" in kube.kubectl(*words, stdin=json.dumps(body))
    job = read(kube, "managed")
    owners = {entry["manager"]: entry for entry in job["metadata"]["managedFields"]}
    writer = [name for name, entry in owners.items() if "f:status" in entry["fieldsV1"]]
    assert writer and all("f:spec" not in owners[name]["fieldsV1"] for name in writer)
    assert job["status"]["state"] == "Pending"
    delete_jobs(kube, "managed")


def test_a_status_that_another_manager_has_written_is_put_right(installed: KubeCluster) -> None:
    kube = installed
    post_job(kube, "meddled", "train.py", "wait", nodes=1)
    loop = make_loop(make_api(kube))
    loop.reconcile_job(read(kube, "meddled"), [])
    wrong = {"state": "Running", "nodes": 7, "reason": "mine"}
    kube.server.api.merge(f"{JOBS}/meddled/status", {"status": wrong})
    kube.wait_until(
        lambda: pods_of(kube, "meddled")["meddled-0"]["status"]["phase"] == "Running", "it runs"
    )
    loop.reconcile_all()
    status = read(kube, "meddled")["status"]
    assert (status["state"], status["nodes"]) == ("Running", 1)
    assert "reason" not in status
    delete_jobs(kube, "meddled")


def test_an_object_of_somebody_else_is_left_alone(installed: KubeCluster) -> None:
    kube = installed
    spec = {"clusterIP": "None", "selector": {"app": "other"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": spec}
    kube.server.api.request("POST", "/api/v1/namespaces/default/services", service)
    post_job(kube, "taken", "train.py", nodes=1)
    loop = make_loop(make_api(kube))
    with pytest.raises(UsageError, match="Service taken exists and is not of this job"):
        loop.reconcile_job(read(kube, "taken"), [])
    status = read(kube, "taken")["status"]
    assert status["reason"] == "Service taken exists and is not of this job"
    assert not pods_of(kube, "taken")
    found = kube.server.api.request("GET", "/api/v1/namespaces/default/services/taken")
    assert found["spec"]["selector"] == {"app": "other"}
    kube.kubectl("delete", "service", "taken")
    loop.reconcile_job(read(kube, "taken"), [])
    job = read(kube, "taken")
    assert "reason" not in job["status"]
    assert sorted(pods_of(kube, "taken")) == ["taken-0"]
    delete_jobs(kube, "taken")


def test_a_younger_pod_of_the_name_is_not_deleted(installed: KubeCluster) -> None:
    kube = installed
    post_job(kube, "younger", "train.py", "wait", nodes=1)
    api = make_api(kube)
    make_loop(api).reconcile_job(read(kube, "younger"), [])
    api.delete("Pod", "younger-0", uid="an-older-one")
    assert "deletionTimestamp" not in pods_of(kube, "younger")["younger-0"]["metadata"]
    delete_jobs(kube, "younger")


def test_of_two_operators_that_take_the_lease_at_once_one_has_it(installed: KubeCluster) -> None:
    api = make_api(installed)
    installed.kubectl("delete", "lease", crd.OPERATOR_NAME, "--ignore-not-found")
    leases = [OperatorLease(api, f"racer-{index}") for index in range(4)]
    held: list[bool] = []
    barrier = threading.Barrier(len(leases))

    def race(lease: OperatorLease) -> None:
        barrier.wait()
        held.append(lease._try())

    threads = [threading.Thread(target=race, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held) == [False, False, False, True]
    # A renewal of the object as it was before: the server refuses it.
    old = api.get("Lease", crd.OPERATOR_NAME)
    assert old is not None
    newer = {**old, "spec": {**old["spec"], "leaseTransitions": 7}}
    assert api.replace(newer)
    assert not api.replace({**old, "spec": {**old["spec"], "leaseTransitions": 8}})
    installed.kubectl("delete", "lease", crd.OPERATOR_NAME)
