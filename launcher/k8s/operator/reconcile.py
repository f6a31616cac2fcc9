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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.errors import PdrunError, UsageError
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.k8s.manifest import (
    API_VERSION,
    KIND,
    LOST_POD_EXIT_CODES,
    MAX_LOST_SCHEDULERS,
    drop_nodes,
    make_node_template,
    make_scheduler_service,
    make_service,
)
from pdrun.launcher.k8s.options import (
    MAX_LABEL_LENGTH,
    SCHEDULER_SUFFIX,
    ClaimVolume,
    KubernetesOptions,
    check_request,
    parse_volume,
)
from pdrun.launcher.k8s.overlay import apply_overlay, check_overlay
from pdrun.launcher.k8s.pod import (
    TOKEN_KEY,
    Manifest,
    PodRequest,
    object_labels,
)
from pdrun.launcher.k8s.pods import PodState, read_pod
from pdrun.launcher.k8s.scheduler_pod import (
    make_scheduler_template,
    max_lost_pods,
    replaces_lost_pods,
    scheduler_name,
)

INDEX_LABEL = "pdrun.dev/index"
FINAL_STATES = ("Succeeded", "Failed")
MAX_REASON_LENGTH = 1_024


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


@dataclass(frozen=True)
class JobRequest:
    """What a PdJob asks for, checked."""

    name: str
    nodes: int
    """Pods now."""
    min_nodes: int
    max_nodes: int
    suspend: bool
    ttl: int | None
    resolved: ResolvedSpec
    words: tuple[str, ...]
    options: KubernetesOptions
    overlay: Manifest

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on without some of its nodes."""
        return self.min_nodes < self.max_nodes

    @property
    def replaces_pods(self) -> bool:
        """Whether a lost pod is made again."""
        return replaces_lost_pods(self.resolved.spec, self.options)

    @property
    def max_lost_pods(self) -> int:
        """How many pods may be lost in the life of the job."""
        return max_lost_pods(self.resolved.spec, self.options)


WordReader = Callable[[Sequence[str]], ResolvedSpec]
"""
Returns what ``pdrun run WORDS`` requests in an empty environment; raises PdrunError. The command
line's parser is above this room: it is passed in.
"""


def read_job(job: Manifest, read_words: WordReader) -> JobRequest:
    """
    Check a PdJob.

    Raises:
        PdrunError: it is wrong; the message names the field.
    """
    try:
        return _read_spec(job, read_words)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # the schema was bypassed
        raise UsageError(f"{type(error).__name__}: {error}", where="spec") from None


def _read_spec(job: Manifest, read_words: WordReader) -> JobRequest:
    spec = job["spec"]
    name = str(job["metadata"]["name"])
    nodes = int(spec.get("nodes") or 1)
    least = int(spec.get("minNodes") or nodes)
    most = int(spec.get("maxNodes") or max(nodes, least))
    if not least <= nodes <= most:
        raise UsageError(f"must be {least} to {most}, got {nodes}", where="spec.nodes")
    scheduler = _read_scheduler(spec.get("scheduler"))
    longest = max(len(f"-{most - 1}"), len(SCHEDULER_SUFFIX) if scheduler else 0)
    if len(name) + longest > MAX_LABEL_LENGTH or "." in name:
        raise UsageError(
            f"{name} is no host name with an index of up to {most - 1}", where="metadata.name"
        )
    words = tuple(str(word) for word in spec["run"])
    count = f"{least}:{most}" if least < most else str(most)
    if drop_nodes(words) != list(words):
        raise UsageError("--nodes is spec.nodes", where="spec.run", hint="leave it out")
    resolved = read_words(("--nodes", count, *words))
    check_request(resolved)
    overlay = spec.get("pod") or {}
    check_overlay(overlay, "spec.pod")
    ttl = spec.get("ttlSeconds")
    return JobRequest(
        name=name,
        nodes=nodes,
        min_nodes=least,
        max_nodes=most,
        suspend=bool(spec.get("suspend")),
        ttl=None if ttl is None else int(ttl),
        resolved=resolved,
        words=("--nodes", count, *words),
        options=KubernetesOptions(
            image=str(spec["image"]),
            kind="pdjob",
            secret=str(spec.get("secret") or ""),
            scheduler=scheduler,
        ),
        overlay=overlay,
    )


def _read_scheduler(field: Mapping[str, Any] | None) -> ClaimVolume | None:
    if not field:
        return None
    return parse_volume(f"{field['claim']}:{field['path']}", "spec.scheduler")


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
            actions.append(Create(_make_secret(request, job, token)))
        actions.append(Create(_own(make_service(_pod_request(request)), job)))
        actions += [Create(_make_pod(request, job, index)) for index in missing]
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
        change["reason"] = _cut(f"{waiting[0].name}: {waiting[0].reason}")
    for pod in map(read_pod, own_scheduler):
        # also while the nodes run: they wait for it
        if (pod.code or pod.reason) and not pod.is_leaving:
            change["reason"] = _cut(f"{pod.name}: {_describe(pod)}")
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
        service = make_scheduler_service(_pod_request(request))
        return [Create(_own(service, job)), Create(_make_scheduler(request, job))], 0
    dead = [pod for pod in pods if is_lost(read_pod(pod))]
    if not dead or lost >= MAX_LOST_SCHEDULERS:
        return [], 0
    ended = _end_pods(dead)
    return ended, len(ended)


def find_verdict(
    request: JobRequest, states: Mapping[int, PodState], status: Mapping[str, Any]
) -> tuple[int, str] | None:
    """
    Return (exit code, reason) of the job; None: it has not ended.

    The code is pdrun's, which all pods return. A pod that is being deleted says nothing, nor does
    one that was lost and is made again.
    """
    ended = [pod for _, pod in sorted(states.items()) if pod.has_ended and not pod.is_leaving]
    if request.replaces_pods:
        lost = [pod for pod in ended if is_lost(pod)]
        ended = [pod for pod in ended if not is_lost(pod)]
        count = int(status.get("lostPods") or 0) + len(lost)
        if lost and not ended and count > request.max_lost_pods:
            text = f"{count} pods were lost, more than {request.max_lost_pods}"
            return lost[0].code or 1, _cut(f"{text}; last {lost[0].name}: {_describe(lost[0])}")
    elif status.get("startTime") and not states:
        return LOST_POD_EXIT_CODES[1], "its pods were deleted"
    if not ended:
        return None
    bad = [pod for pod in ended if pod.code != 0]
    if bad:
        # one with pdrun's last words names the cause, before one that the kubelet ended
        chosen = next((pod for pod in bad if pod.message), bad[0])
        code = chosen.code if chosen.code is not None else 1
        return code, _cut(chosen.message or f"pod {chosen.name}: {_describe(chosen)}")
    if request.is_elastic or len(ended) >= request.nodes:
        return 0, ""
    return None


def is_lost(pod: PodState) -> bool:
    """Return whether a pod ended without a verdict: killed, deleted, evicted, never run."""
    return pod.phase == "Failed" and (pod.code is None or pod.code in LOST_POD_EXIT_CODES)


def _describe(pod: PodState) -> str:
    return pod.reason or (f"exit code {pod.code}" if pod.code is not None else "no exit code")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_REASON_LENGTH else text[: MAX_REASON_LENGTH - 3] + "..."


def _count_running(states: Mapping[int, PodState]) -> int:
    return sum(pod.phase == "Running" and not pod.is_leaving for pod in states.values())


def _index_of(pod: Manifest) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(INDEX_LABEL, ""))
    return int(text) if text.isdecimal() else -1


def _pod_request(request: JobRequest) -> PodRequest:
    secret = request.options.secret or f"{request.name}-token"
    return PodRequest(request.name, request.resolved.spec, request.options, request.words, secret)


def _make_pod(request: JobRequest, job: Manifest, index: int) -> Manifest:
    template = apply_overlay(make_node_template(_pod_request(request)), request.overlay)
    name = f"{request.name}-{index}"
    spec = template["spec"]
    spec["hostname"] = name
    container = next(one for one in spec["containers"] if one["name"] == "pdrun")
    container["env"] += [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
    metadata = template["metadata"]
    metadata["name"] = name
    metadata["labels"] = {**(metadata.get("labels") or {}), INDEX_LABEL: str(index)}
    return _own({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, job)


def _make_scheduler(request: JobRequest, job: Manifest) -> Manifest:
    key = str(job["metadata"].get("uid", ""))
    template = make_scheduler_template(_pod_request(request), key, request.overlay)
    metadata = {**template["metadata"], "name": scheduler_name(request.name)}
    return _own(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}, job
    )


def _make_secret(request: JobRequest, job: Manifest, token: str) -> Manifest:
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
    return _own(body, job)


def _own(body: Manifest, job: Manifest) -> Manifest:
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
