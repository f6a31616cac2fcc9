"""The verdict on a job, as its pods tell it by their ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.launcher.k8s.manifest import LOST_POD_EXIT_CODES
from pdrun.launcher.k8s.operator.job_request import JobRequest
from pdrun.launcher.k8s.pods import PodState

MAX_REASON_LENGTH = 1_024


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
            return lost[0].code or 1, cut_reason(
                f"{text}; last {lost[0].name}: {describe_end(lost[0])}"
            )
    elif status.get("startTime") and not states:
        return LOST_POD_EXIT_CODES[1], "its pods were deleted"
    if not ended:
        return None
    bad = [pod for pod in ended if pod.code != 0]
    if bad:
        # one with pdrun's last words names the cause, before one that the kubelet ended
        chosen = next((pod for pod in bad if pod.message), bad[0])
        code = chosen.code if chosen.code is not None else 1
        return code, cut_reason(chosen.message or f"pod {chosen.name}: {describe_end(chosen)}")
    if request.is_elastic or len(ended) >= request.nodes:
        return 0, ""
    return None


def is_lost(pod: PodState) -> bool:
    """Return whether a pod ended without a verdict: killed, deleted, evicted, never run."""
    return pod.phase == "Failed" and (pod.code is None or pod.code in LOST_POD_EXIT_CODES)


def describe_end(pod: PodState) -> str:
    """Return why a pod ended or waits, for a status."""
    return pod.reason or (f"exit code {pod.code}" if pod.code is not None else "no exit code")


def cut_reason(text: str) -> str:
    """Return a reason that is short enough for a status."""
    return text if len(text) <= MAX_REASON_LENGTH else text[: MAX_REASON_LENGTH - 3] + "..."
