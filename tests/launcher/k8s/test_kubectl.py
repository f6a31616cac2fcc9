"""What is said when kubectl is missing, slow or refuses, and when names are taken; no cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, PdrunError, RendezvousError, UsageError
from pdrun.launcher.k8s import cluster
from pdrun.launcher.k8s.kubectl import Kubectl
from pdrun.launcher.k8s.options import parse_kind
from tests.launcher.k8s import golden


def make_kubectl(folder: Path, script: str) -> Kubectl:
    """Return a kubectl that is a shell script."""
    path = folder / "kubectl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Kubectl(environ={"PATH": f"{folder}:/usr/bin:/bin"})


def test_without_kubectl_the_other_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Kubectl(environ={"PATH": str(tmp_path)}).run("version")
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "pdrun k8s: kubectl was not found on PATH; install it, or apply what pdrun k8s render prints"
        " elsewhere"
    )


def test_a_kubectl_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"kubectl version: no answer after 0\.2 s; is the"):
        make_kubectl(tmp_path, "exec sleep 60").run("version", seconds=0.2)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'error: no context exists' >&2; exit 1", "kubectl get: no context exists"),
        ("printf '\\377\\376' >&2; exit 1", "kubectl get: \ufffd\ufffd"),
        ("exit 1", "kubectl get: it failed without a message"),
        ("echo '{'", "kubectl get: its output is not JSON"),
        (
            'printf \'Warning: old\\nerror: Apply failed with 2 conflicts: conflicts with "x":\\n'
            "- .type\\n- .data.token\\nPlease review the fields\\n' >&2; exit 1",
            'kubectl get: Apply failed with 2 conflicts: conflicts with "x": .type, .data.token',
        ),
    ],
)
def test_a_refusal_has_its_reason(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        make_kubectl(tmp_path, script).get("secrets")
    assert str(caught.value) == message


def make_cluster(folder: Path, resources: str, found: dict[str, object] | None) -> Kubectl:
    """Return the kubectl of a cluster that has some kinds of jobs and one object."""
    (folder / "found.json").write_text(json.dumps(found or {}))
    name = found["metadata"]["name"] if found else "none"  # type: ignore[index]
    return make_kubectl(
        folder,
        f"""echo "$*" >> {folder}/calls
case "$1 $2 $3" in
  "api-resources "*) printf '{resources}' ;;
  "version "*) echo '{{"serverVersion": {{"gitVersion": "v1.21.3"}}}}' ;;
  "explain "*) test -e {folder}/indexed ;;
  "get secrets {name}") cat {folder}/found.json ;;
  "get "*) echo 'Error from server (NotFound): none' >&2; exit 1 ;;
  *) exit 3 ;;
esac""",
    )


@pytest.mark.parametrize(
    ("words", "resources", "message"),
    [
        (
            "",
            "jobs.batch",
            "--kind job: the server (v1.21.3) has no indexed Jobs; Kubernetes 1.24 and later have"
            " them",
        ),
        (
            "--kind lws",
            "jobs.batch",
            "--kind lws: the cluster does not have leaderworkersets.leaderworkerset.x-k8s.io;"
            " install LeaderWorkerSet, or use --kind job",
        ),
        (
            "--kind pdjob",
            "jobs.batch",
            "--kind pdjob: the cluster does not have pdjobs.pdrun.dev; apply what pdrun k8s operator"
            " manifest prints, or use --kind job",
        ),
    ],
)
def test_a_cluster_without_the_kind_is_named(
    tmp_path: Path, words: str, resources: str, message: str
) -> None:
    objects = golden.make_case([*words.split(), "--image", "i", "train.py"])
    kind = parse_kind(words.split()[-1] if words else "job", "--kind")
    with pytest.raises(ConfigError) as caught:
        cluster.submit_objects(make_cluster(tmp_path, resources, None), kind, objects)
    assert (caught.value.exit_code, str(caught.value)) == (78, message)


@pytest.mark.parametrize("labels", [{}, {"pdrun.dev/job": "other"}, None])
def test_a_secret_of_somebody_else_is_left_alone(
    tmp_path: Path, labels: dict[str, str] | None
) -> None:
    (tmp_path / "indexed").touch()
    found = {"kind": "Secret", "metadata": {"name": "train-token", "labels": labels}}
    objects = golden.make_case(["--image", "i", "train.py"])
    with pytest.raises(PdrunError) as caught:
        cluster.submit_objects(make_cluster(tmp_path, "jobs.batch", found), "job", objects)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "--name: Secret train-token exists and is not of this job; use another name"
    )
    calls = (tmp_path / "calls").read_text()
    assert "apply" not in calls and "delete" not in calls
