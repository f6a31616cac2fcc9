"""
The pod of a separate scheduler (``--scheduler-pod CLAIM:/PATH``): the job survives the loss of
any node, the first one too.

The scheduler keeps its journal on the claim. A pod in its place continues the job from there, and
the workers run on meanwhile, as long as ``--on-scheduler-loss`` allows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from pdrun.errors import UsageError
from pdrun.launcher.config.options import keep_options
from pdrun.launcher.config.run_options import RUN_OPTIONS, SCHEDULER_OPTIONS
from pdrun.launcher.config.spec import JobSpec
from pdrun.launcher.k8s.options import SCHEDULER_SUFFIX, KubernetesOptions
from pdrun.launcher.k8s.overlay import apply_overlay
from pdrun.launcher.k8s.pod import (
    JOB_LABEL,
    ROLE_LABEL,
    SCHEDULER_ROLE,
    Manifest,
    PodRequest,
    container_of,
    make_template,
)

SCHEDULER_PORT = 29_400
"""The scheduler's Service has an address that outlives its pods."""
RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}}
SCHEDULER_KINDS = ("job", "pdjob")
"""Kinds of jobs that may have a scheduler's pod."""
_SET_BY_PDRUN = ("--nodes", "--job", "--token-file")


def scheduler_name(name: str) -> str:
    """Return the name of the pod's host, and of its Job."""
    return name + SCHEDULER_SUFFIX


def node_words(name: str, options: KubernetesOptions) -> list[str]:
    """Return the options by which the nodes find the scheduler; empty without one."""
    if options.scheduler is None:
        return []
    return ["--scheduler", f"{scheduler_name(name)}:{SCHEDULER_PORT}", "--no-serve"]


def replaces_lost_pods(spec: JobSpec, options: KubernetesOptions) -> bool:
    """
    Return whether a node's pod that was lost is made again: the job goes on without it, or waits
    for it under a scheduler that was not lost with it.
    """
    waits = options.scheduler is not None and spec.policy.max_restarts > 0
    return spec.resources.is_elastic or waits


def max_lost_pods(spec: JobSpec, options: KubernetesOptions) -> int:
    """Return how many pods of nodes may be lost in the life of a job."""
    if not replaces_lost_pods(spec, options):
        return 0
    return spec.resources.max_members * max(1, spec.policy.max_restarts)


def scheduler_service_body(name: str) -> Manifest:
    """Return the body of the Service by which the nodes reach the scheduler."""
    return {
        "spec": {
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: name, ROLE_LABEL: SCHEDULER_ROLE},
            "ports": [{"name": "scheduler", "port": SCHEDULER_PORT}],
        }
    }


def check_scheduler(options: KubernetesOptions) -> None:
    """
    Refuse a scheduler's pod that the job cannot have.

    Raises:
        UsageError: the kind of job has none, or its journal could not be written.
    """
    if options.scheduler is None:
        return
    where = "--scheduler-pod"
    if options.kind not in SCHEDULER_KINDS:
        hint = f"use --kind {' or '.join(SCHEDULER_KINDS)}"
        raise UsageError(f"--kind {options.kind} has none", where=where, hint=hint)
    if options.scheduler.read_only:
        raise UsageError("the journal is written there", where=where, hint="leave :ro out")


def make_scheduler_template(request: PodRequest, journal_key: str, overlay: Manifest) -> Manifest:
    """
    Return the template of the scheduler's pod.

    Of the overlay it gets what decides where pods run and what they may: neither sidecars nor
    accelerators.

    Args:
        request: the job's, with a scheduler.
        journal_key: differs between jobs of one name, whose journals must not be mixed up.
        overlay: that of the job's pods.
    """
    claim = request.options.scheduler
    if claim is None:
        raise ValueError("the job has no scheduler's pod")
    digest = hashlib.sha256(journal_key.encode()).hexdigest()[:12]
    journal = f"{claim.path.rstrip('/')}/{request.name}-{digest}.journal"
    plain = replace(request.options, volumes=(), limits=(), scheduler=None)
    template = apply_overlay(make_template(replace(request, options=plain)), overlay)
    spec = template["spec"]
    container = container_of(template)
    container["command"] = ["pdrun", "scheduler", *_scheduler_words(request, journal)]
    container["resources"] = RESOURCES
    mounts = [one for one in container["volumeMounts"] if one["mountPath"] != claim.path]
    container["volumeMounts"] = [*mounts, {"name": "journal", "mountPath": claim.path}]
    spec["containers"] = [container]
    spec["hostname"] = scheduler_name(request.name)
    spec["volumes"].append({"name": "journal", "persistentVolumeClaim": {"claimName": claim.claim}})
    template["metadata"]["labels"][ROLE_LABEL] = SCHEDULER_ROLE
    return template


def _scheduler_words(request: PodRequest, journal: str) -> Sequence[str]:
    names = [name for name in SCHEDULER_OPTIONS if name not in _SET_BY_PDRUN]
    own = ["--nodes", request.spec.resources.node_range]
    own += ["--listen", f"{scheduler_name(request.name)}:{SCHEDULER_PORT}", "--journal", journal]
    return [*own, *keep_options(request.words, RUN_OPTIONS, names)]
