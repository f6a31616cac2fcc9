"""An operator beside a cluster for tests, with the rights of its role; what it wrote."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from pdrun.launcher.cli.clusters.k8s_operator import read_run_words
from pdrun.launcher.k8s.operator import crd
from pdrun.launcher.k8s.operator.api import KubernetesApi
from pdrun.launcher.k8s.operator.loop import OperatorLoop
from pdrun.launcher.k8s.pod import Manifest
from pdrun.rendezvous.protocol.security import Secret, format_token
from tests.lib.kube.cluster import KubeCluster
from tests.lib.kube.server import OPERATOR_TOKEN

OPTIONS = ("--kind", "pdjob", "--devices", "2", "--backend", "cpu", "--image", "i", "--grace", "5")
JOBS = "/apis/pdrun.dev/v1/namespaces/default/pdjobs"


def make_api(kube: KubeCluster, kind: type[KubernetesApi] = KubernetesApi) -> KubernetesApi:
    """Return the API as oscar sees it, who has the operator's role and nothing else."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    token = kube.folder / "oscar.token"
    token.write_text(OPERATOR_TOKEN)
    return kind(kube.server.url, "default", token_file=token, context=context)


def make_loop(api: KubernetesApi, lines: list[str] | None = None) -> OperatorLoop:
    """Return an operator."""
    report = print if lines is None else lines.append
    return OperatorLoop(api, read_run_words, lambda: format_token(Secret.random()), report)


def install_operator(kube: KubeCluster) -> None:
    """Apply the definition and the roles; oscar is bound to the operator's role."""
    definition = crd.make_definition()
    objects = [definition, *crd.make_roles("default")]
    binding = next(one for one in objects if one["kind"] == "RoleBinding")
    group = "rbac.authorization.k8s.io"
    binding["subjects"] = [{"kind": "User", "name": "oscar", "apiGroup": group}]
    text = yaml.safe_dump_all(objects)
    out = kube.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    assert "serverside-applied" in out, out
    kube.wait_until(lambda: kube.serves(definition["spec"]), "the definition is served")


@contextmanager
def run_operator(kube: KubeCluster) -> Iterator[OperatorLoop]:
    """Run an operator in a thread."""
    loop = make_loop(make_api(kube))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(30)


def read(kube: KubeCluster, name: str) -> Manifest:
    """Return a PdJob."""
    return kube.server.api.request("GET", f"{JOBS}/{name}")


def post_job(kube: KubeCluster, name: str, *words: str, **spec: Any) -> None:
    """Create a PdJob as ``pdrun k8s submit`` does, which costs a second of CPU."""
    run = ["--devices", "2", "--backend", "cpu", "--grace", "5", *words]
    body: Manifest = {"apiVersion": "pdrun.dev/v1", "kind": "PdJob", "metadata": {"name": name}}
    body["spec"] = {"image": "i", "run": run, **spec}
    kube.server.api.request("POST", JOBS, body)


def delete_jobs(kube: KubeCluster, *names: str) -> None:
    """Delete PdJobs; the garbage collector takes what they own."""
    for name in names:
        kube.server.api.request("DELETE", f"{JOBS}/{name}")


def state_of(kube: KubeCluster, name: str) -> str:
    """Return the state that the operator has written."""
    return str((read(kube, name).get("status") or {}).get("state", ""))


def wait_for_state(kube: KubeCluster, name: str, state: str) -> Manifest:
    """Wait for a state of a PdJob; return the PdJob."""
    kube.wait_until(lambda: state_of(kube, name) == state, f"{name} {state}")
    return read(kube, name)


def pods_of(kube: KubeCluster, name: str) -> dict[str, Manifest]:
    """Return the pods of a job by name."""
    path = f"/api/v1/namespaces/default/pods?labelSelector=pdrun.dev/job={name}"
    items = kube.server.api.request("GET", path)["items"]
    return {pod["metadata"]["name"]: pod for pod in items}
