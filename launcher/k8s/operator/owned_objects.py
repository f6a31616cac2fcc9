"""The objects that belong to a PdJob: pods, Secret, and what says that they are its own."""

from __future__ import annotations

from pdrun.launcher.k8s.manifest import API_VERSION, KIND, make_node_template
from pdrun.launcher.k8s.operator.job_request import JobRequest
from pdrun.launcher.k8s.overlay import apply_overlay
from pdrun.launcher.k8s.pod import TOKEN_KEY, Manifest, PodRequest, object_labels
from pdrun.launcher.k8s.scheduler_pod import make_scheduler_template, scheduler_name

INDEX_LABEL = "pdrun.dev/index"


def make_pod_request(request: JobRequest) -> PodRequest:
    """Return what the pods of a job are made from."""
    secret = request.options.secret or f"{request.name}-token"
    return PodRequest(request.name, request.resolved.spec, request.options, request.words, secret)


def make_pod(request: JobRequest, job: Manifest, index: int) -> Manifest:
    """Return the pod of an index."""
    template = apply_overlay(make_node_template(make_pod_request(request)), request.overlay)
    name = f"{request.name}-{index}"
    spec = template["spec"]
    spec["hostname"] = name
    container = next(one for one in spec["containers"] if one["name"] == "pdrun")
    container["env"] += [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
    metadata = template["metadata"]
    metadata["name"] = name
    metadata["labels"] = {**(metadata.get("labels") or {}), INDEX_LABEL: str(index)}
    return own_object({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, job)


def make_scheduler(request: JobRequest, job: Manifest) -> Manifest:
    """Return the separate pod of the scheduler."""
    key = str(job["metadata"].get("uid", ""))
    template = make_scheduler_template(make_pod_request(request), key, request.overlay)
    metadata = {**template["metadata"], "name": scheduler_name(request.name)}
    return own_object(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}, job
    )


def make_secret(request: JobRequest, job: Manifest, token: str) -> Manifest:
    """Return the Secret with the token of a job that brings none."""
    body: Manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": f"{request.name}-token",
            "labels": object_labels(request.name, request.options),
        },
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }
    return own_object(body, job)


def own_object(body: Manifest, job: Manifest) -> Manifest:
    """Return an object that is deleted with the job."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"].get("uid", ""),
        "controller": True,
        "blockOwnerDeletion": False,
    }
    metadata = {**body["metadata"], "ownerReferences": [owner]}
    if "namespace" in job["metadata"]:
        metadata["namespace"] = job["metadata"]["namespace"]
    return {**body, "metadata": metadata}
