"""Jobs of other operators on a real API server that has their definitions, without controllers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.lib.kube.cluster import KubeCluster
from tests.lib.kube.definitions import read_definitions
from tests.lib.tiers import is_thorough

pytestmark = pytest.mark.timeout(300)
OPTIONS = ("--nodes", "2", "--devices", "8", "--image", "i")
KINDS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "lws": "leaderworkersets.leaderworkerset.x-k8s.io",
    "volcano": "jobs.batch.volcano.sh",
    "pytorchjob": "pytorchjobs.kubeflow.org",
}


@pytest.fixture(scope="module")
def defined(kube: KubeCluster) -> Iterator[KubeCluster]:
    """The cluster with the definitions of all four operators."""
    bodies = read_definitions()
    names = [body["metadata"]["name"] for body in bodies]
    out = kube.kubectl("create", "-f", "-", stdin=json.dumps(as_list(bodies)))
    assert out.count(" created") == len(names), out
    kube.wait_until(
        lambda: all(kube.serves(body["spec"]) for body in bodies), "the definitions are served"
    )
    yield kube
    kube.kubectl("delete", "crd", *names)  # other tests want to see that they are missing


def as_list(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": bodies}


def find_lost_fields(sent: Any, kept: Any, path: str = "") -> list[str]:
    """Return the fields that the server has dropped or changed; it may have added others."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        lost = [f"{path}.{key}" for key in sent if key not in kept]
        both = [key for key in sent if key in kept]
        return lost + [
            one for k in both for one in find_lost_fields(sent[k], kept[k], f"{path}.{k}")
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        pairs = enumerate(zip(sent, kept, strict=True))
        return [one for i, (a, b) in pairs for one in find_lost_fields(a, b, f"{path}[{i}]")]
    return [] if sent == kept else [path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_submitted_seen_and_deleted(defined: KubeCluster, kind: str) -> None:
    kube, name = defined, f"of-{kind}"
    words = (*OPTIONS, "--kind", kind, "--name", name, "train.py")
    rendered = list(yaml.safe_load_all(kube.pdrun("render", *words).stdout))[-1]
    done = kube.pdrun("submit", *words)
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
    both = (f"{KINDS[kind]}/{name}", f"secret/{name}-token")
    kept, secret = json.loads(kube.kubectl("get", *both, "-o", "json"))["items"]
    assert find_lost_fields(rendered, kept) == []
    assert secret["metadata"]["ownerReferences"][0]["uid"] == kept["metadata"]["uid"]
    if kind == "jobset" or is_thorough():
        assert kube.pdrun("status", name).stdout.startswith(f"{name}: no pods yet")
        again = kube.pdrun("submit", *words)
        assert again.returncode == 2
        assert f"{kept['kind']} {name} exists" in again.stderr
    assert kube.pdrun("stop", name).returncode == 0
    assert kube.kubectl("get", *both).count("NotFound") == 2


def test_a_mistake_is_refused_by_the_server(defined: KubeCluster) -> None:
    done = defined.pdrun("render", *OPTIONS, "--kind", "lws", "--name", "wrong", "train.py")
    body = list(yaml.safe_load_all(done.stdout))[-1]
    body["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    out = defined.kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(body))
    assert 'Unsupported value: "Never"' in out


def test_a_field_of_another_manager_is_a_conflict_and_nothing_is_left(
    defined: KubeCluster,
) -> None:
    """A Secret of the job's name, which a tool of a repository has made before."""
    kube, words = defined, (*OPTIONS, "--kind", "jobset", "--name", "twice", "train.py")
    secret = next(yaml.safe_load_all(kube.pdrun("render", *words).stdout))
    secret["type"] = "example.com/other"
    apply = ("apply", "--server-side", "--field-manager=gitops", "-f", "-")
    assert "serverside-applied" in kube.kubectl(*apply, stdin=json.dumps(secret))
    done = kube.pdrun("submit", *words)
    assert done.returncode == 69
    assert 'conflicts with "gitops": ' in done.stderr and ".type" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "NotFound" in kube.kubectl("get", KINDS["jobset"], "twice")
    kept = json.loads(kube.kubectl("get", "secret", "twice-token", "-o", "json"))
    assert kept["type"] == "example.com/other", "what was there before stays"
    kube.kubectl("delete", "secret", "twice-token")
