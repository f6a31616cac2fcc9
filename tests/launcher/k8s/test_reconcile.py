"""What the operator writes: any state converges, one pod per index, a verdict is final."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import PdrunError
from pdrun.launcher.cli.clusters.k8s_operator import read_run_words
from pdrun.launcher.k8s.manifest import MAX_LOST_SCHEDULERS
from pdrun.launcher.k8s.operator.job_request import read_job
from pdrun.launcher.k8s.operator.owned_objects import INDEX_LABEL
from pdrun.launcher.k8s.operator.reconcile import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    SetStatus,
    reconcile,
)
from pdrun.launcher.k8s.pod import Manifest

NOW = "2026-01-01T00:00:00Z"


def make_job(**spec: Any) -> Manifest:
    """Return a PdJob as the API server would hand it out."""
    return {
        "apiVersion": "pdrun.dev/v1",
        "kind": "PdJob",
        "metadata": {"name": "train", "namespace": "default", "uid": "u-1", "generation": 1},
        "spec": {"image": "i", "run": ["train.py"], "nodes": 1, "suspend": False, **spec},
    }


class Model:
    """What the API server holds of one job, and pods that start and end as a test says."""

    def __init__(self, job: Manifest) -> None:
        self.job = job
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.uids = 0
        self.is_deleted = False
        self.request = read_job(job, read_run_words)

    @property
    def pods(self) -> list[Manifest]:
        return [body for (kind, _), body in sorted(self.objects.items()) if kind == "Pod"]

    @property
    def state(self) -> str:
        return str((self.job.get("status") or {}).get("state", ""))

    def plan(self, **options: Any) -> list[Action]:
        pods = copy.deepcopy(self.pods)
        request = read_job(self.job, read_run_words)
        return reconcile(self.job, request, pods, token="t", now=NOW, **options)

    def step(self) -> list[Action]:
        """Carry out one pass; return what it wrote."""
        actions = self.plan()
        for action in actions:
            self.carry_out(action)
        return actions

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Create):
            body = copy.deepcopy(action.body)
            key = (body["kind"], body["metadata"]["name"])
            if key in self.objects:
                return  # 409
            self.uids += 1
            body["metadata"]["uid"] = f"p-{self.uids}"
            body["status"] = {"phase": "Pending"}
            self.objects[key] = body
        elif isinstance(action, DeletePod):
            pod = self.objects.get(("Pod", action.name))
            if pod is None or pod["metadata"]["uid"] != action.uid:
                return
            if pod["status"]["phase"] == "Running":
                pod["metadata"]["deletionTimestamp"] = NOW
            else:
                del self.objects["Pod", action.name]
        elif isinstance(action, DeleteJob):
            self.is_deleted = True
        else:
            status = {**(self.job.get("status") or {}), **action.status}
            self.job["status"] = {key: value for key, value in status.items() if value is not None}

    def settle(self) -> None:
        """Pass until nothing is written; pods that are leaving go."""
        for _ in range(12):
            written = self.step()
            for key, body in list(self.objects.items()):
                if body["metadata"].get("deletionTimestamp"):
                    del self.objects[key]
                    written.append(DeletePod("", ""))
            if not written:
                return
        pytest.fail(f"does not converge: {written}")

    def start_all(self) -> None:
        for pod in self.pods:
            if pod["status"]["phase"] == "Pending":
                pod["status"] = {"phase": "Running"}

    def end(self, index: int | str, code: int | None, message: str = "") -> None:
        pod = self.objects["Pod", f"train-{index}"]
        phase = "Succeeded" if code == 0 else "Failed"
        pod["status"] = {"phase": phase}
        if code is not None:
            ended = {"exitCode": code, "reason": "Error", "message": message}
            pod["status"]["containerStatuses"] = [{"name": "pdrun", "state": {"terminated": ended}}]


def indices(model: Model) -> list[str]:
    labels = [pod["metadata"]["labels"] for pod in model.pods]
    return [one[INDEX_LABEL] for one in labels if INDEX_LABEL in one]


def test_a_job_gets_secret_service_and_pods() -> None:
    model = Model(make_job(nodes=2, run=["--devices", "8", "train.py"]))
    model.settle()
    assert sorted(model.objects) == [
        ("Pod", "train-0"),
        ("Pod", "train-1"),
        ("Secret", "train-token"),
        ("Service", "train"),
    ]
    for body in model.objects.values():
        assert body["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    container = model.pods[1]["spec"]["containers"][0]
    assert container["command"] == ["pdrun", "run", "--nodes", "2", "--devices", "8", "train.py"]
    assert {"name": "JOB_COMPLETION_INDEX", "value": "1"} in container["env"]
    assert model.state == "Pending"
    model.start_all()
    model.settle()
    assert model.state == "Running"


def test_success_needs_all_pods() -> None:
    model = Model(make_job(nodes=2))
    model.settle()
    model.start_all()
    model.end(0, 0)
    model.settle()
    assert model.state in ("Running", "Pending")
    model.end(1, 0)
    model.settle()
    assert (model.state, model.job["status"]["code"]) == ("Succeeded", 0)


def test_a_failure_has_the_code_and_the_first_cause() -> None:
    model = Model(make_job(nodes=2))
    model.settle()
    model.start_all()
    model.end(0, 7, "job failed: rank 3 on train-1 ended with exit code 7")
    model.settle()
    status = model.job["status"]
    assert (status["state"], status["code"]) == ("Failed", 7)
    assert status["reason"] == "job failed: rank 3 on train-1 ended with exit code 7"
    del model.objects["Pod", "train-1"]
    model.settle()
    assert indices(model) == ["0"], "no pod is made after the verdict"


def test_a_fixed_job_whose_pod_is_deleted_is_not_filled_up() -> None:
    model = Model(make_job(nodes=2))
    model.settle()
    model.start_all()
    model.settle()
    del model.objects["Pod", "train-1"]
    model.settle()
    assert indices(model) == ["0"]
    model.end(0, 143)
    model.settle()
    assert model.job["status"]["code"] == 143


def test_a_job_all_of_whose_pods_are_deleted_has_failed() -> None:
    model = Model(make_job())
    model.settle()
    del model.objects["Pod", "train-0"]
    model.settle()
    assert (model.state, model.job["status"]["reason"]) == ("Failed", "its pods were deleted")


@pytest.mark.parametrize("code", [None, 137, 143])
def test_a_lost_pod_of_an_elastic_job_comes_back(code: int | None) -> None:
    model = Model(make_job(nodes=3, minNodes=2, maxNodes=3))
    model.settle()
    model.start_all()
    uid = model.objects["Pod", "train-1"]["metadata"]["uid"]
    model.end(1, code)
    model.settle()
    assert indices(model) == ["0", "1", "2"]
    assert model.objects["Pod", "train-1"]["metadata"]["uid"] != uid
    assert model.job["status"]["lostPods"] == 1


def test_pods_are_not_lost_without_end() -> None:
    model = Model(make_job(nodes=2, minNodes=1, maxNodes=2))
    model.settle()
    for _ in range(10):
        model.start_all()
        for index in range(2):
            if ("Pod", f"train-{index}") in model.objects:
                model.end(index, 137)
        model.settle()
    assert model.state == "Failed"
    assert "pods were lost, more than 2" in model.job["status"]["reason"]


def test_scale_deletes_the_last_pods_and_makes_them_again() -> None:
    model = Model(make_job(nodes=2, minNodes=1, maxNodes=3))
    model.settle()
    model.start_all()
    for nodes, wanted in ((3, ["0", "1", "2"]), (1, ["0"]), (2, ["0", "1"])):
        model.job["spec"]["nodes"] = nodes
        model.settle()
        model.start_all()
        assert indices(model) == wanted
    assert "lostPods" not in model.job["status"]


def test_suspend_ends_the_pods_and_resume_makes_them_again() -> None:
    model = Model(make_job(nodes=2))
    model.settle()
    model.start_all()
    model.job["spec"]["suspend"] = True
    model.settle()
    assert (indices(model), model.state) == ([], "Suspended")
    model.job["spec"]["suspend"] = False
    model.settle()
    assert indices(model) == ["0", "1"]


def test_a_job_is_deleted_after_its_time() -> None:
    model = Model(make_job(ttlSeconds=60))
    model.job["status"] = {"state": "Failed", "endTime": NOW}
    assert model.plan(seconds_since_end=59.0) == []
    assert model.plan(seconds_since_end=60.0) == [DeleteJob()]


JOURNALS = {"claim": "journals", "path": "/journal"}


def test_a_scheduler_has_a_pod_of_its_own() -> None:
    run = ["--devices", "8", "--max-restarts=2", "train.py", "--grace", "1"]
    model = Model(make_job(nodes=2, scheduler=JOURNALS, run=run))
    model.settle()
    assert indices(model) == ["0", "1"]
    pod = model.objects["Pod", "train-scheduler"]
    command = pod["spec"]["containers"][0]["command"]
    assert command[:6] == [
        "pdrun",
        "scheduler",
        "--nodes",
        "2",
        "--listen",
        "train-scheduler:29400",
    ]
    assert command[6] == "--journal" and command[7].startswith("/journal/train-")
    assert command[8:] == ["--max-restarts=2"]
    assert "nvidia.com/gpu" not in str(pod["spec"]["containers"][0]["resources"])
    words = model.pods[0]["spec"]["containers"][0]["command"]
    assert words[2:5] == ["--scheduler", "train-scheduler:29400", "--no-serve"]


def test_journals_of_two_jobs_of_one_name_differ() -> None:
    paths = []
    for uid in ("u-1", "u-2"):
        job = make_job(scheduler=JOURNALS)
        job["metadata"]["uid"] = uid
        model = Model(job)
        model.settle()
        paths.append(model.objects["Pod", "train-scheduler"]["spec"]["containers"][0]["command"][7])
    assert paths[0] != paths[1]


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_lost_scheduler_is_made_again_in_a_fixed_job(is_deleted: bool) -> None:
    model = Model(make_job(nodes=2, scheduler=JOURNALS))
    model.settle()
    model.start_all()
    model.settle()
    uid = model.objects["Pod", "train-scheduler"]["metadata"]["uid"]
    if is_deleted:
        del model.objects["Pod", "train-scheduler"]
    else:
        model.end("scheduler", 137)
    model.settle()
    assert model.objects["Pod", "train-scheduler"]["metadata"]["uid"] != uid
    assert (model.state, model.job["status"]["nodes"]) == ("Running", 2)
    assert model.job["status"].get("lostSchedulers", 0) == (0 if is_deleted else 1)


@pytest.mark.parametrize("code", [None, 137])
def test_a_lost_pod_of_a_fixed_job_comes_back_under_a_scheduler_of_its_own(
    code: int | None,
) -> None:
    run = ["--max-restarts", "1", "train.py"]
    model = Model(make_job(nodes=2, scheduler=JOURNALS, run=run))
    model.settle()
    model.start_all()
    model.settle()
    model.end(0, code)
    model.settle()
    assert indices(model) == ["0", "1"]
    assert (model.state, model.job["status"]["lostPods"]) == ("Pending", 1)
    model.end(1, 7, "rank 3 on train-1 ended with exit code 7")
    model.settle()
    assert (model.state, model.job["status"]["code"]) == ("Failed", 7)


def test_a_scheduler_is_not_lost_without_end() -> None:
    model = Model(make_job(nodes=1, scheduler=JOURNALS))
    model.settle()
    for _ in range(MAX_LOST_SCHEDULERS + 3):
        model.start_all()
        model.end("scheduler", 137)
        model.settle()
    assert model.job["status"]["lostSchedulers"] == MAX_LOST_SCHEDULERS
    assert model.objects["Pod", "train-scheduler"]["status"]["phase"] == "Failed"


def test_a_scheduler_that_cannot_start_is_named_while_the_nodes_wait() -> None:
    model = Model(make_job(nodes=2, scheduler=JOURNALS))
    model.settle()
    model.start_all()
    model.end("scheduler", 2)
    model.settle()
    assert model.job["status"]["reason"] == "train-scheduler: exit code 2"
    assert model.state == "Running", "the verdict is that of the nodes"


def test_a_scheduler_ends_with_its_job() -> None:
    model = Model(make_job(nodes=1, scheduler=JOURNALS))
    model.settle()
    model.start_all()
    model.end(0, 7)
    model.settle()
    assert model.state == "Failed"
    assert ("Pod", "train-scheduler") not in model.objects
    model = Model(make_job(nodes=1, scheduler=JOURNALS))
    model.settle()
    model.start_all()
    model.job["spec"]["suspend"] = True
    model.settle()
    assert model.pods == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"scheduler": {"claim": "a b", "path": "/x"}}, "spec.scheduler: 'a b' is not the name"),
        ({"scheduler": {"claim": "c", "path": "x"}}, "spec.scheduler: must be CLAIM:/PATH"),
        ({"scheduler": {"claim": "c"}}, "spec: KeyError"),
        ({"run": ["--nodes", "2", "a.py"]}, "spec.run: --nodes is spec.nodes; leave it out"),
        ({"run": ["--hosts", "a", "a.py"]}, "--hosts: has no meaning in pods"),
        ({"run": ["--devices"]}, "spec.run: Option '--devices' requires an argument."),
        ({"run": ["--max-restarts", "x", "a.py"]}, "--max-restarts: "),
        ({"nodes": 4, "maxNodes": 2}, "spec.nodes: must be 4 to 2, got 4"),
        ({"nodes": 1, "minNodes": 2}, "spec.nodes: must be 2 to 2, got 1"),
        ({"pod": {"spec": {"subdomain": "x"}}}, "spec.pod: spec.subdomain is set by pdrun"),
        ({"pod": {"spce": {}}}, "spec.pod: unknown key spce; did you mean 'spec'?"),
        ({"run": None}, "spec: TypeError"),
    ],
)
def test_a_wrong_spec_is_named(spec: dict[str, Any], message: str) -> None:
    job = make_job(**spec)
    with pytest.raises(PdrunError) as caught:
        read_job(job, read_run_words)
    assert str(caught.value).startswith(message)
    actions = reconcile(job, caught.value, [], token="t", now=NOW)
    assert len(actions) == 1
    assert isinstance(actions[0], SetStatus)
    assert actions[0].status["state"] == "Invalid"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("delete"), st.integers(0, 4)),
        st.tuples(st.just("start"), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([None, 137, 143])),
        st.tuples(st.just("scale"), st.integers(1, 4)),
        st.tuples(st.just("suspend"), st.booleans()),
        st.tuples(st.just("crash"), st.integers(0, 5)),
    ),
    max_size=12,
)


@given(EVENTS, st.booleans(), st.booleans())
def test_every_history_converges_with_one_pod_per_index(
    events: list[tuple[Any, ...]], elastic: bool, apart: bool
) -> None:
    spec: dict[str, Any] = {"nodes": 3}
    if elastic:
        spec = {"nodes": 2, "minNodes": 1, "maxNodes": 4}
    if apart:
        spec["scheduler"] = JOURNALS
    model = Model(make_job(**spec))
    for kind, *values in events:
        if kind == "delete" and model.objects:
            key = sorted(model.objects)[values[0] % len(model.objects)]
            del model.objects[key]
        elif kind == "start":
            model.start_all()
        elif kind == "end" and ("Pod", f"train-{values[0]}") in model.objects:
            model.end(values[0], values[1])
        elif kind == "scale" and elastic:
            model.job["spec"]["nodes"] = values[0]
        elif kind == "suspend":
            model.job["spec"]["suspend"] = values[0]
        elif kind == "crash":  # the operator is killed after some of its writes
            for action in model.plan()[: values[0]]:
                model.carry_out(action)
        assert len(set(indices(model))) == len(indices(model))
        assert len(model.pods) - len(indices(model)) <= apart
    model.settle()
    assert model.plan() == []
    if model.state in ("Pending", "Running") and elastic:
        wanted = [str(index) for index in range(model.job["spec"]["nodes"])]
        assert indices(model) == wanted
        assert (("Pod", "train-scheduler") in model.objects) == apart
        assert ("Service", "train") in model.objects or not events
