"""
Submit a job's objects and delete them; what the cluster has.

The Secret and the Service belong to the job's object (ownerReferences): who deletes the job, by
pdrun or by kubectl, deletes all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pdrun.errors import ConfigError, PdrunError, RendezvousError, UsageError, did_you_mean
from pdrun.launcher.k8s.kubectl import REQUEST_SECONDS, Kubectl
from pdrun.launcher.k8s.manifest import RESOURCE_NAMES, format_json
from pdrun.launcher.k8s.options import KINDS, Kind
from pdrun.launcher.k8s.pod import JOB_LABEL, MANAGED_BY_LABEL, Manifest
from pdrun.text import quote_command

DELETE_MARGIN_SECONDS = 30.0
FIELD_MANAGER = "pdrun"
CRD_HINTS: Mapping[Kind, str] = {
    "job": "",
    "pdjob": "apply what pdrun k8s operator manifest prints, or use --kind job",
    "jobset": "install JobSet, or use --kind job",
    "lws": "install LeaderWorkerSet, or use --kind job",
    "volcano": "install Volcano, or use --kind job",
    "pytorchjob": "install Kubeflow's training operator, or use --kind job",
}


def check_support(kubectl: Kubectl, kind: Kind) -> None:
    """
    Refuse a kind of job that the cluster does not have.

    A server without indexed Jobs drops the fields that it does not know: every pod would be node 0.

    Raises:
        ConfigError: the cluster does not have it.
    """
    is_known = kind in list_kinds(kubectl)
    if kind == "job" and not (is_known and has_indexed_jobs(kubectl)):
        raise ConfigError(
            f"the server ({server_version(kubectl)}) has no indexed Jobs",
            where="--kind job",
            hint="Kubernetes 1.24 and later have them",
        )
    if not is_known:
        raise ConfigError(
            f"the cluster does not have {RESOURCE_NAMES[kind]}",
            where=f"--kind {kind}",
            hint=CRD_HINTS[kind],
        )


def has_indexed_jobs(kubectl: Kubectl) -> bool:
    """Return whether the server gives the pods of a Job an index."""
    return kubectl.succeeds("explain", "jobs.spec.completionMode")


def list_kinds(kubectl: Kubectl) -> tuple[Kind, ...]:
    """Return the kinds of jobs that the cluster has."""
    listed = kubectl.run("api-resources", "-o", "name", f"--request-timeout={REQUEST_SECONDS}s")
    names = frozenset(listed.split())
    return tuple(kind for kind in KINDS if RESOURCE_NAMES[kind] in names)


def server_version(kubectl: Kubectl) -> str:
    """Return the version of the API server."""
    text = kubectl.run("version", "-o", "json", f"--request-timeout={REQUEST_SECONDS}s")
    try:
        return str(json.loads(text)["serverVersion"]["gitVersion"])
    except (ValueError, KeyError, TypeError):
        return "unknown version"


def submit_objects(kubectl: Kubectl, kind: Kind, objects: Sequence[Manifest]) -> None:
    """
    Create the objects of a job, the job last; if one is refused, none that is new is left.

    Raises:
        UsageError: an object of that name exists and is not this job's.
        ConfigError: the cluster does not have this kind of job.
        RendezvousError: the cluster refused an object; the message has its reason.
    """
    check_support(kubectl, kind)
    job = objects[-1]
    known = _check_free(kubectl, kind, objects)
    try:
        created = json.loads(
            kubectl.run(
                *("apply", "--server-side", f"--field-manager={FIELD_MANAGER}"),
                *("-f", "-", "-o", "json", f"--request-timeout={REQUEST_SECONDS}s"),
                stdin=format_json(objects),
            )
        )
    except PdrunError:
        # kubectl goes on after a refusal: the job may be there although its Secret was refused
        helpers = [_resource_of(one) for one in objects[:-1]]
        new = [f"{RESOURCE_NAMES[kind]}/{job['metadata']['name']}", *helpers]
        for resource in new:
            if resource not in known:
                with suppress(PdrunError):
                    kubectl.run("delete", resource, "--ignore-not-found", "--wait=false")
        raise
    uid = _find_uid(created, str(job["kind"]))
    owned = [_add_owner(one, job, uid) for one in objects[:-1]]
    if owned and uid:
        kubectl.run(
            *("apply", "--server-side", f"--field-manager={FIELD_MANAGER}", "-f", "-"),
            f"--request-timeout={REQUEST_SECONDS}s",
            stdin=format_json(owned),
        )


def _resource_of(helper: Manifest) -> str:
    """Return a Secret or Service as kubectl names it: ``secrets/train-token``."""
    return f"{helper['kind']}s/{helper['metadata']['name']}".lower()


def _check_free(kubectl: Kubectl, kind: Kind, objects: Sequence[Manifest]) -> set[str]:
    """Refuse names that are taken; return the objects that an earlier try has left."""
    left: set[str] = set()
    for one in objects:
        name = one["metadata"]["name"]
        is_job = one is objects[-1]
        resource = RESOURCE_NAMES[kind] if is_job else f"{one['kind']}s".lower()
        known = kubectl.get(resource, name)
        if known is None:
            continue
        if is_job:
            raise UsageError(
                f"{one['kind']} {name} exists",
                where="--name",
                hint=f"use another name, or {quote_command('pdrun', 'k8s', 'stop', name)}",
            )
        job = objects[-1]["metadata"]["name"]
        labels = known.get("metadata", {}).get("labels") or {}
        if labels.get(JOB_LABEL) != job:
            raise UsageError(
                f"{one['kind']} {name} exists and is not of this job",
                where="--name",
                hint="use another name",
            )
        left.add(_resource_of(one))
    return left


def _find_uid(created: Manifest, kind: str) -> str:
    items = created["items"] if created.get("kind") == "List" else [created]
    uids = [one["metadata"]["uid"] for one in items if one.get("kind") == kind]
    return str(uids[-1]) if uids else ""


def _add_owner(one: Manifest, job: Manifest, uid: str) -> Manifest:
    owner = {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "name": job["metadata"]["name"],
        "uid": uid,
    }
    return {**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}}


def _delete_parts(kubectl: Kubectl, name: str) -> None:
    selector = f"{JOB_LABEL}={name},{MANAGED_BY_LABEL}=pdrun"
    kubectl.run("delete", "secrets,services", "-l", selector, "--ignore-not-found", "--wait=false")


@dataclass(frozen=True)
class SubmittedJob:
    """A job that is in the cluster."""

    name: str
    kind: Kind
    body: Manifest


def list_jobs(kubectl: Kubectl) -> list[SubmittedJob]:
    """Return pdrun's jobs in the namespace, by name."""
    kinds = {RESOURCE_NAMES[kind]: kind for kind in list_kinds(kubectl)}
    jobs = []
    for resource, kind in kinds.items():
        for item in kubectl.list_items(resource, "-l", f"{MANAGED_BY_LABEL}=pdrun"):
            owners = item["metadata"].get("ownerReferences")
            if not owners:  # the Job of a JobSet has one
                jobs.append(SubmittedJob(item["metadata"]["name"], kind, item))
    return sorted(jobs, key=lambda job: job.name)


def find_job(kubectl: Kubectl, name: str) -> SubmittedJob:
    """
    Return a job.

    Raises:
        UsageError: the namespace has no such job of pdrun; the hint has the names that it has.
    """
    jobs = list_jobs(kubectl)
    for job in jobs:
        if job.name == name:
            return job
    names = [job.name for job in jobs]
    hint = did_you_mean(name, names)
    if not hint and names:
        hint = f"there are {', '.join(names[:10])}"
    raise UsageError(
        f"no job of pdrun called {name} in this namespace",
        where="pdrun k8s",
        hint=hint or "the namespace has no jobs; is --namespace right?",
    )


def delete_job(kubectl: Kubectl, job: SubmittedJob, grace: float) -> None:
    """
    Delete a job and wait until its pods are gone. SIGTERM reaches every pod: the workers may save.

    Args:
        kubectl: how the cluster is reached.
        job: what `find_job` returned.
        grace: seconds that a pod may take to end.

    Raises:
        RendezvousError: the cluster refused it, or a pod is still there.
    """
    seconds = grace + DELETE_MARGIN_SECONDS
    kubectl.run(
        *("delete", RESOURCE_NAMES[job.kind], job.name, "--ignore-not-found"),
        *("--cascade=foreground", f"--timeout={round(seconds)}s"),
        seconds=seconds + REQUEST_SECONDS,
    )
    _delete_parts(kubectl, job.name)
    left = kubectl.list_items("pods", "-l", f"{JOB_LABEL}={job.name}")
    if left:
        names = ", ".join(sorted(str(pod["metadata"]["name"]) for pod in left)[:5])
        raise RendezvousError(
            f"pods are still ending: {names}", where=job.name, hint="see kubectl get pods"
        )
