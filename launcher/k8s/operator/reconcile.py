"""
What to write for a PdJob, given what is there. Pure: no clock, no random numbers, no requests.

Each index has one pod, whose name is that of the job with the index. So the API server itself
refuses a second pod of an index.

    fixed size   every pod is made once; the first that ends tells the verdict
    elastic      a pod that was lost (deleted, evicted, killed) is made again under its name, up to
                 a limit; every other end is the verdict. So is one of a fixed job with restarts and
                 a scheduler's pod
    scheduler    in a separate pod, if asked for; it is made again whenever it is lost
    scale        pods from `spec.nodes` on are deleted: their agents tell the job that they leave

A verdict is final: no pod is made after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.errors import PdrunError
from pdrun.launcher.k8s.manifest import MAX_LOST_SCHEDULERS, make_scheduler_service, make_service
from pdrun.launcher.k8s.operator.job_request import JobRequest
from pdrun.launcher.k8s.operator.owned_objects import (
    INDEX_LABEL,
    make_pod,
    make_pod_request,
    make_scheduler,
    make_secret,
    own_object,
)
from pdrun.launcher.k8s.operator.verdict import cut_reason, describe_end, find_verdict, is_lost
from pdrun.launcher.k8s.pod import Manifest
from pdrun.launcher.k8s.pods import PodState, read_pod

FINAL_STATES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Create:
    """Create an object, unless it is there: a token never changes, and a pod cannot."""

    body: Manifest


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod; its agent gets SIGTERM."""

    name: str
    uid: str
    """The pod that was seen; a younger one of the name stays."""


@dataclass(frozen=True)
class DeleteJob:
    """Delete the PdJob itself, at the end of its time to live."""


@dataclass(frozen=True)
class SetStatus:
    """Write the status."""

    status: Mapping[str, Any]


Action = Create | DeletePod | DeleteJob | SetStatus


def reconcile(
    job: Manifest,
    request: JobRequest | PdrunError,
    pods: Sequence[Manifest],
    *,
    token: str,
    now: str,
    seconds_since_end: float = 0.0,
) -> list[Action]:
    """
    Return what to write, in this order.

    Args:
        job: the PdJob.
        request: what `read_job` made of it.
        pods: its pods.
        token: a new token, for a Secret that does not exist.
        now: the time (RFC 3339, UTC), for the status.
        seconds_since_end: since ``status.endTime``, if the job has ended.
    """
    status = dict(job.get("status") or {})
    own_scheduler = [pod for pod in pods if read_pod(pod).role]
    pods = [pod for pod in pods if not read_pod(pod).role]
    if status.get("state") in FINAL_STATES:
        ttl = None if isinstance(request, PdrunError) else request.ttl
        if ttl is not None and seconds_since_end >= ttl:
            return [DeleteJob()]
        is_over = all(read_pod(pod).has_ended for pod in pods)
        return _end_pods(one for one in own_scheduler if not read_pod(one).has_ended) * is_over
    if isinstance(request, PdrunError):
        return _set_status(job, status, {"state": "Invalid", "reason": str(request)})
    states = {_index_of(pod): read_pod(pod) for pod in pods}
    uids = {str(pod["metadata"]["name"]): str(pod["metadata"].get("uid", "")) for pod in pods}
    running = _count_running(states)
    if request.suspend:
        actions = _end_pods([*pods, *own_scheduler])
        change = {"state": "Suspended", "nodes": running, "reason": "", "startTime": None}
        return [*actions, *_set_status(job, status, change)]
    verdict = find_verdict(request, states, status)
    if verdict is not None:
        code, reason = verdict
        state = "Succeeded" if code == 0 else "Failed"
        end = {"state": state, "code": code, "reason": reason, "endTime": now, "nodes": running}
        return _set_status(job, status, end)
    return _keep_running(request, job, states, uids, own_scheduler, token, now)


def _end_pods(pods: Iterable[Manifest]) -> list[Action]:
    """Return the actions that delete pods, unless they are being deleted."""
    return [
        DeletePod(str(pod["metadata"]["name"]), str(pod["metadata"].get("uid", "")))
        for pod in pods
        if not read_pod(pod).is_leaving
    ]


def _keep_running(
    request: JobRequest,
    job: Manifest,
    states: Mapping[int, PodState],
    uids: Mapping[str, str],
    own_scheduler: Sequence[Manifest],
    token: str,
    now: str,
) -> list[Action]:
    """Return the actions for a job that should run."""
    status = dict(job.get("status") or {})
    actions: list[Action] = []
    change: dict[str, Any] = {"reason": ""}
    lost_schedulers = int(status.get("lostSchedulers") or 0)
    kept, ended = _keep_scheduler(request, job, own_scheduler, lost_schedulers)
    if ended:
        change["lostSchedulers"] = lost_schedulers + ended
    lost = int(status.get("lostPods") or 0)
    for index, pod in sorted(states.items()):
        if pod.is_leaving:
            continue
        if index >= request.nodes or (request.replaces_pods and is_lost(pod)):
            actions.append(DeletePod(pod.name, uids[pod.name]))
            lost += is_lost(pod) and index < request.nodes
    # A fixed job's pods are made once: one that is missing later was lost, and the others say so.
    has_begun = bool(status.get("startTime"))
    missing = [index for index in range(request.nodes) if index not in states]
    if missing and (not has_begun or request.replaces_pods):
        if not request.options.secret:
            actions.append(Create(make_secret(request, job, token)))
        actions.append(Create(own_object(make_service(make_pod_request(request)), job)))
        actions += [Create(make_pod(request, job, index)) for index in missing]
    actions += kept  # after Secret and Service
    running = _count_running(states)
    change["nodes"] = running
    change["state"] = "Running" if running >= request.min_nodes else "Pending"
    if lost:
        change["lostPods"] = lost
    if not has_begun and not missing and not any(pod.is_leaving for pod in states.values()):
        change["startTime"] = now
    waiting = [pod for pod in states.values() if pod.reason and not pod.has_ended]
    if change["state"] == "Pending" and waiting:
        change["reason"] = cut_reason(f"{waiting[0].name}: {waiting[0].reason}")
    for pod in map(read_pod, own_scheduler):
        # also while the nodes run: they wait for it
        if (pod.code or pod.reason) and not pod.is_leaving:
            change["reason"] = cut_reason(f"{pod.name}: {describe_end(pod)}")
    return [*actions, *_set_status(job, status, change)]


def _keep_scheduler(
    request: JobRequest, job: Manifest, pods: Sequence[Manifest], lost: int
) -> tuple[list[Action], int]:
    """
    Return the actions that keep a scheduler's pod, and how many were found lost.

    A scheduler that ended by itself has informed the nodes: they bring the verdict.
    """
    if request.options.scheduler is None:
        return [], 0
    if not pods:
        service = make_scheduler_service(make_pod_request(request))
        return [Create(own_object(service, job)), Create(make_scheduler(request, job))], 0
    dead = [pod for pod in pods if is_lost(read_pod(pod))]
    if not dead or lost >= MAX_LOST_SCHEDULERS:
        return [], 0
    ended = _end_pods(dead)
    return ended, len(ended)


def _count_running(states: Mapping[int, PodState]) -> int:
    return sum(pod.phase == "Running" and not pod.is_leaving for pod in states.values())


def _index_of(pod: Manifest) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(INDEX_LABEL, ""))
    return int(text) if text.isdecimal() else -1


def _set_status(
    job: Manifest, status: Mapping[str, Any], change: Mapping[str, Any]
) -> list[Action]:
    """Return the action that changes the status, or nothing if it is so already."""
    wanted = {**status, **change}
    generation = job["metadata"].get("generation")
    if generation is not None:
        wanted["observedGeneration"] = generation
    wanted = {key: value for key, value in wanted.items() if value not in (None, "")}
    current = job.get("status") or {}
    if wanted == {key: value for key, value in current.items() if value not in (None, "")}:
        return []
    # a merge patch removes what is None
    removed = {key: None for key in current if key not in wanted}
    return [SetStatus({**wanted, **removed})]
