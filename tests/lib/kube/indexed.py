"""What the Job controller does for an indexed Job: one pod per index, with name and variable."""

from __future__ import annotations

import copy

from tests.lib.kube.api import ApiClient, Item

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


def make_pod(job: Item, index: int, suffix: str = "aaaaa") -> Item:
    """Return the pod of an index."""
    template = copy.deepcopy(job["spec"]["template"])
    name = job["metadata"]["name"]
    spec = template["spec"]
    spec["hostname"] = f"{name}-{index}"
    variable = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
    for container in spec["containers"]:
        container.setdefault("env", []).append(variable)
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": name,
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {
        "name": f"{name}-{index}-{suffix}",
        "labels": {**template["metadata"]["labels"], INDEX_LABEL: str(index)},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def create_pods(api: ApiClient, job: Item) -> None:
    """Create every pod of a Job that the server has."""
    for index in range(job["spec"]["completions"]):
        api.request("POST", "/api/v1/namespaces/default/pods", make_pod(job, index))
