"""
What the pods of a job do, and why: phases and reasons of Kubernetes, in one table.

    Unschedulable        the scheduler's text            ImagePullBackOff    the image
    OOMKilled, Evicted   with the exit code              Failed              pdrun's first cause

The verdict is pdrun's: a pod's termination message (`pdrun.launcher.common.termination_log`) has
the first cause on every node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdrun.launcher.k8s.pod import CONTAINER_NAME, ROLE_LABEL, Manifest
from pdrun.text import escape_text, natural_key, plural

MAX_REASON_LENGTH = 300
INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "pdrun.dev/index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "volcano.sh/task-index",
    "training.kubeflow.org/replica-index",
)
_BAD_CONDITIONS = (("PodScheduled", "False"), ("DisruptionTarget", "True"))
_QUIET_REASONS = ("Completed", "Error", "ContainerCreating", "PodInitializing")
"""Reasons that say no more than the phase and the exit code."""


@dataclass(frozen=True)
class PodState:
    """One pod."""

    name: str
    phase: str
    """Pending, Running, Succeeded, Failed or Unknown."""
    code: int | None = None
    """Exit code of pdrun's container; None: it has not ended."""
    reason: str = ""
    """Why it is not running, in Kubernetes' words; empty: nothing is wrong."""
    message: str = ""
    """pdrun's own last words; empty: none yet."""
    node: str = ""
    """Where it runs."""
    is_leaving: bool = False
    """Whether it is being deleted."""
    index: str = ""
    """Its index in the job; empty: its kind of job has none."""
    role: str = ""
    """What it is, if it is no node: ``scheduler``."""
    created: str = ""
    """When, in UTC (RFC 3339). A lost pod has a younger one of its index."""

    @property
    def has_started(self) -> bool:
        """Whether it has output."""
        return self.phase in ("Running", "Succeeded", "Failed") and not self.never_ran

    @property
    def has_ended(self) -> bool:
        """Whether it will have no more output."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def never_ran(self) -> bool:
        """Whether it failed before its container began: evicted or refused by its node."""
        return self.phase == "Failed" and self.code is None


def read_pods(items: Iterable[Manifest]) -> list[PodState]:
    """Return the state of every pod, in the order of their names."""
    return sorted((read_pod(item) for item in items), key=lambda pod: natural_key(pod.name))


def read_pod(item: Manifest) -> PodState:
    """Return the state of a pod. Missing parts of its status are those of a pod just created."""
    metadata = item.get("metadata") or {}
    status = item.get("status") or {}
    code, reasons, message = _read_containers(status)
    for condition in status.get("conditions") or []:
        if (condition.get("type"), condition.get("status")) in _BAD_CONDITIONS:
            reasons.append(_join(condition.get("reason"), condition.get("message")))
    if status.get("reason"):
        reasons.append(_join(status.get("reason"), status.get("message")))
    labels = metadata.get("labels") or {}
    return PodState(
        name=str(metadata.get("name", "")),
        phase=str(status.get("phase") or "Pending"),
        code=code,
        reason=_clean("; ".join(dict.fromkeys(text for text in reasons if text))),
        message=_clean(message, 4_096),
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        is_leaving=bool(metadata.get("deletionTimestamp")),
        index=next((str(labels[key]) for key in INDEX_LABELS if key in labels), ""),
        role=str(labels.get(ROLE_LABEL) or ""),
        created=str(metadata.get("creationTimestamp") or ""),
    )


def _read_containers(status: Mapping[str, Any]) -> tuple[int | None, list[str], str]:
    """Return exit code, reasons and termination message; those of pdrun's container win."""
    code: int | None = None
    reasons: list[str] = []
    message = ""
    lists = (status.get("initContainerStatuses") or [], status.get("containerStatuses") or [])
    for container in (*lists[0], *lists[1]):
        state = container.get("state") or {}
        name = container.get("name")
        is_own = name in (CONTAINER_NAME, "pytorch")
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
        waiting = state.get("waiting") or {}
        prefix = "" if is_own else f"{name}: "
        if waiting and waiting.get("reason") not in _QUIET_REASONS:
            reasons.append(prefix + _join(waiting.get("reason"), waiting.get("message")))
        if not ended:
            continue
        if is_own:
            code = int(ended.get("exitCode", 0)) if state.get("terminated") else None
            message = str(ended.get("message") or "")
        if ended.get("reason") not in _QUIET_REASONS:
            reasons.append(prefix + str(ended.get("reason") or ""))
        elif not is_own and ended.get("exitCode"):
            reasons.append(f"{prefix}exit code {ended['exitCode']}")
    return code, reasons, message


def _join(reason: object, message: object) -> str:
    words = [str(part) for part in (reason, message) if part]
    return ": ".join(words)


def _clean(text: str, limit: int = MAX_REASON_LENGTH) -> str:
    line = escape_text(" ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def current_pods(pods: Sequence[PodState]) -> list[PodState]:
    """Return the youngest pod of each index; all pods of a kind without indices."""
    youngest: dict[str, PodState] = {}
    for pod in sorted(pods, key=lambda pod: pod.created):
        youngest[pod.index or pod.role or pod.name] = pod
    return [pod for pod in pods if youngest[pod.index or pod.role or pod.name] is pod]


def summarize_job(pods: Sequence[PodState], nodes: int) -> str:
    """
    Return the state of a job in one line.

    Args:
        pods: its pods.
        nodes: how many nodes it has.
    """
    pods = current_pods(pods)
    if not pods:
        return "no pods yet"
    causes = list(dict.fromkeys(pod.message for pod in pods if pod.message and pod.code))
    if causes:
        return f"failed: {causes[0]}"
    failed = [pod for pod in pods if pod.phase == "Failed"]
    if failed:
        code = f" with exit code {failed[0].code}" if failed[0].code is not None else ""
        why = f": {failed[0].reason}" if failed[0].reason else ""
        return f"failed: pod {failed[0].name} ended{code}{why}"
    members = [pod for pod in pods if not pod.role]
    if members and all(pod.phase == "Succeeded" for pod in members):
        return "done"
    running = sum(pod.phase == "Running" for pod in members)
    if running == nodes:
        return "running"
    waiting = [pod for pod in pods if pod.reason and not pod.has_ended]
    text = f"waiting: {running} of {plural(nodes, 'pod')} running"
    return f"{text}; {waiting[0].name}: {waiting[0].reason}" if waiting else text


def format_pods(pods: Sequence[PodState]) -> str:
    """Return a table of the pods, one line each; empty without pods."""
    if not pods:
        return ""
    rows = [("pod", "state", "code", "node", "why")]
    for pod in pods:
        state = "ending" if pod.is_leaving and not pod.has_ended else pod.phase.lower()
        code = "" if pod.code is None else str(pod.code)
        rows.append((pod.name, state, code, pod.node, pod.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    return "\n".join(f"  {line}" for line in lines) + "\n"


def to_json(pods: Sequence[PodState]) -> list[dict[str, Any]]:
    """Return the pods as JSON values."""
    return [asdict(pod) for pod in pods]
