"""A PdJob, checked: what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.errors import UsageError
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.k8s.manifest import drop_nodes
from pdrun.launcher.k8s.options import (
    MAX_LABEL_LENGTH,
    SCHEDULER_SUFFIX,
    ClaimVolume,
    KubernetesOptions,
    check_request,
    parse_volume,
)
from pdrun.launcher.k8s.overlay import check_overlay
from pdrun.launcher.k8s.pod import Manifest
from pdrun.launcher.k8s.scheduler_pod import max_lost_pods, replaces_lost_pods


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
