"""
The template of a job's pods: one container that runs pdrun on one node.

    env            the token, from a Secret; the job's name
    resources      accelerators of the backend, and ``--limit``
    /dev/shm       memory: a loader's workers and gloo exchange data there
    grace          the time for saving, before the kubelet kills the pod
    no API access  no service account token, no variables of services
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdrun.errors import UsageError
from pdrun.launcher.config.spec import JobSpec
from pdrun.launcher.k8s.options import KubernetesOptions, device_limit, merge_pairs

Manifest = dict[str, Any]
"""An object of Kubernetes, or a part of one: what YAML or JSON can express."""

JOB_LABEL = "pdrun.dev/job"
ROLE_LABEL = "pdrun.dev/role"
"""Of a pod that is no node."""
SCHEDULER_ROLE = "scheduler"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
CONTAINER_NAME = "pdrun"
TOKEN_KEY = "token"
"""Key of the token in its Secret."""
GRACE_MARGIN_SECONDS = 15
"""Between pdrun's own SIGKILL at the end of the grace time, and that of the kubelet."""


@dataclass(frozen=True)
class PodRequest:
    """What the template is made of."""

    name: str
    """Of the job and its service."""
    spec: JobSpec
    options: KubernetesOptions
    words: tuple[str, ...]
    """Arguments of ``pdrun run``, as the user gave them."""
    secret: str
    """Name of the Secret with the token."""


def object_labels(name: str, options: KubernetesOptions) -> dict[str, str]:
    """Return the labels of every object of a job."""
    return {
        MANAGED_BY_LABEL: "pdrun",
        JOB_LABEL: name,
        **merge_pairs(options.labels, "--label"),
    }


def make_template(request: PodRequest) -> Manifest:
    """
    Return the pod template: ``{metadata: {labels}, spec: {...}}``.

    Raises:
        UsageError: two options ask for the same resource or the same path.
    """
    spec = request.spec
    volumes, mounts = _make_volumes(request.options)
    container: Manifest = {
        "name": CONTAINER_NAME,
        "image": request.options.image,
        "command": ["pdrun", "run", *request.words],
        "env": [
            {
                "name": "PDRUN_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": request.secret, "key": TOKEN_KEY}},
            },
            {"name": "PDRUN_JOB", "value": spec.job or request.name},
        ],
        "resources": _make_resources(request),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if not container["resources"]:
        del container["resources"]
    return {
        "metadata": {"labels": object_labels(request.name, request.options)},
        "spec": {
            "restartPolicy": "Never",
            "subdomain": request.name,
            "terminationGracePeriodSeconds": round(spec.policy.grace) + GRACE_MARGIN_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": volumes,
        },
    }


def _make_resources(request: PodRequest) -> Mapping[str, Any]:
    limits = merge_pairs(request.options.limits, "--limit")
    devices = device_limit(request.spec)
    if devices is not None:
        resource, count = devices
        if limits.get(resource, count) != count:
            raise UsageError(
                f"{resource}={limits[resource]} contradicts --devices {count}",
                where="--limit",
                hint="leave it out",
            )
        limits[resource] = count
    if not limits:
        return {}
    return {"limits": limits, "requests": dict(limits)}


def _make_volumes(options: KubernetesOptions) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes, and their mounts in the container."""
    memory: Manifest = {"medium": "Memory"}
    if options.shm:
        memory["sizeLimit"] = options.shm
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": memory}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    names: dict[str, str] = {}
    paths = {"/dev/shm"}
    for volume in options.volumes:
        if volume.path in paths:
            raise UsageError(f"{volume.path} is given twice", where="--volume")
        paths.add(volume.path)
        name = names.setdefault(volume.claim, f"claim-{len(names)}")
        if len(volumes) == len(names):  # the claim is new
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}})
        mount: Manifest = {"name": name, "mountPath": volume.path}
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    return volumes, mounts


def container_of(template: Manifest) -> Manifest:
    """Return pdrun's container of a template."""
    containers: Sequence[Manifest] = template["spec"]["containers"]
    return next(one for one in containers if one["name"] == CONTAINER_NAME)
