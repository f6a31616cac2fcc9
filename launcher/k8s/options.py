"""
What a user asks of Kubernetes: image, name, volumes, limits. Checked before anything is rendered.

Names follow RFC 1123 labels, quantities the format of Kubernetes (``500m``, ``64Gi``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.config.spec import JobSpec
from pdrun.text import quote_command

Kind = Literal["job", "pdjob", "jobset", "lws", "volcano", "pytorchjob"]
KINDS: tuple[Kind, ...] = ("job", "pdjob", "jobset", "lws", "volcano", "pytorchjob")
MAX_LABEL_LENGTH = 63
"""Longest name of a pod's host (RFC 1123)."""
DEVICE_RESOURCES = {
    "cuda": "nvidia.com/gpu",
    "rocm": "amd.com/gpu",
    "npu": "huawei.com/Ascend910",
    "xpu": "gpu.intel.com/i915",
}
"""Backend -> resource that the device plugin of its vendor registers."""
REFUSED_FIELDS = {
    "place.hosts": "the pods are the hosts",
    "place.local": "the pods are the nodes",
    "place.node_rank": "each pod has its own index",
    "place.node_name": "each pod has its own name",
    "place.scheduler": "the first pod runs the scheduler",
    "place.serve": "the first pod runs the scheduler",
    "place.launcher": "each pod finds its place itself",
    "place.rank_table": "the pods' operator writes the rank table",
    "place.token_file": "the pods read the token from a Secret",
    "reach.ssh": "nothing is started over ssh",
    "reach.ssh_opts": "nothing is started over ssh",
    "reach.ssh_window": "nothing is started over ssh",
    "reach.ship": "the image contains pdrun",
    "reach.forward": "use --env NAME=VALUE",
    "reach.mpirun": "nothing is started by mpirun",
    "reach.mpirun_opts": "nothing is started by mpirun",
    "reach.srun_opts": "nothing is started by srun",
}
"""Fields of the JobSpec that have no meaning in pods, and why."""
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_KEY = re.compile(r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9][-A-Za-z0-9_.]{0,62}")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_IMAGE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_./:@+]{0,511}")


@dataclass(frozen=True)
class ClaimVolume:
    """A PersistentVolumeClaim and where the pods see it."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class KubernetesOptions:
    """The options of ``pdrun k8s render`` and ``submit``."""

    image: str
    kind: Kind = "job"
    name: str = ""
    """Name of every object; empty: derived from the program."""
    namespace: str = ""
    """Empty: that of the user's context."""
    volumes: tuple[ClaimVolume, ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    """(resource, quantity) per pod; requests are the same."""
    labels: tuple[tuple[str, str], ...] = ()
    """Additional labels of every object, for queues and accounting."""
    secret: str = ""
    """Name of the user's own Secret with the key ``token``; empty: one is made."""
    shm: str = ""
    """Size limit of /dev/shm; empty: the node's default."""
    scheduler: ClaimVolume | None = None
    """Where a scheduler in a separate pod keeps its journal; None: the first pod runs it."""
    ttl: int | None = None
    """Seconds after the end until the cluster deletes the job; None: never."""


def parse_name(text: str, where: str) -> str:
    """Return a name that is a DNS label (RFC 1123), else raise UsageError with a proposal."""
    if _LABEL.fullmatch(text):
        return text
    proposal = propose_name(text)
    raise UsageError(
        f"{quote_text(text)} is not a name in Kubernetes: a-z, 0-9 and '-', at most "
        f"{MAX_LABEL_LENGTH} characters",
        where=where,
        hint=f"use {proposal}" if proposal else "use a name such as train-1",
    )


def propose_name(text: str) -> str:
    """Return the DNS label that resembles a text; empty if nothing of it is left."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name[:MAX_LABEL_LENGTH].strip("-")


def parse_namespace(text: str, where: str) -> str:
    """Return the name of a namespace."""
    return parse_name(text, where)


def parse_object_name(text: str, where: str) -> str:
    """Return the name of an object that the user has made: a DNS subdomain."""
    if not _SUBDOMAIN.fullmatch(text):
        raise UsageError(f"{quote_text(text)} is not the name of an object", where=where)
    return text


def parse_kind(text: str, where: str) -> Kind:
    """Return one of `KINDS`."""
    for kind in KINDS:
        if text == kind:
            return kind
    hint = did_you_mean(text, KINDS) or f"use one of {', '.join(KINDS)}"
    raise UsageError(f"unknown kind {quote_text(text)}", where=where, hint=hint)


def parse_image(text: str, where: str) -> str:
    """Return the name of an image."""
    if not _IMAGE.fullmatch(text):
        raise UsageError(f"{quote_text(text)} is not the name of an image", where=where)
    return text


def parse_quantity(text: str, where: str) -> str:
    """Return a quantity of Kubernetes: ``8``, ``500m``, ``64Gi``."""
    if not _QUANTITY.fullmatch(text):
        hint = "write a number, with a unit if needed: 8, 500m, 64Gi"
        if re.fullmatch(r"[0-9.]+(?:g|m|k|t)i?b?", text.lower()):
            hint = "write units as Ki, Mi, Gi or k, M, G"
        raise UsageError(f"{quote_text(text)} is not a quantity", where=where, hint=hint)
    return text


def parse_limit(text: str, where: str) -> tuple[str, str]:
    """Return (resource, quantity) of ``cpu=8``."""
    key, value = _split_pair(text, where, "cpu=8")
    if not _KEY.fullmatch(key):
        raise UsageError(f"{quote_text(key)} is not the name of a resource", where=where)
    return key, parse_quantity(value, where)


def parse_label(text: str, where: str) -> tuple[str, str]:
    """Return (key, value) of ``kueue.x-k8s.io/queue-name=research``."""
    key, value = _split_pair(text, where, "team=vision")
    if not _KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        raise UsageError(
            f"{quote_text(text)} is not a label",
            where=where,
            hint="a value has at most 63 of a-z, A-Z, 0-9, '-', '_' and '.'",
        )
    if key.partition("/")[0] == "pdrun.dev":
        raise UsageError(f"{key} is set by pdrun", where=where, hint="use a prefix of your own")
    return key, value


def _split_pair(text: str, where: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(
            f"must be KEY=VALUE, got {quote_text(text)}", where=where, hint=f"example: {example}"
        )
    return key, value


def parse_volume(text: str, where: str) -> ClaimVolume:
    """Return the volume of ``CLAIM:/path`` or ``CLAIM:/path:ro``."""
    claim, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not path.startswith("/") or mode not in ("", "ro", "rw") or ".." in path.split("/"):
        raise UsageError(
            f"must be CLAIM:/PATH or CLAIM:/PATH:ro, got {quote_text(text)}",
            where=where,
            hint="example: datasets:/data:ro",
        )
    return ClaimVolume(parse_object_name(claim, where), path, mode == "ro")


def check_request(resolved: ResolvedSpec) -> None:
    """
    Refuse options of pdrun that have no meaning in pods.

    Raises:
        UsageError: the option, and why.
    """
    for path, reason in REFUSED_FIELDS.items():
        source = resolved.sources.get(path, "default")
        if source != "default":
            raise UsageError(f"has no meaning in pods: {reason}", where=source, hint="leave it out")


def choose_name(options: KubernetesOptions, spec: JobSpec) -> str:
    """
    Return the name of the objects: ``--name``, ``--job``, or that of the program.

    Raises:
        UsageError: it is no DNS label, or too long for the names of the pods' hosts.
    """
    where = "--name"
    if options.name:
        name = parse_name(options.name, where)
    elif spec.job:
        name = parse_name(spec.job, "--job")
        where = "--job"
    else:
        target = spec.program.target
        word = PurePosixPath(target).stem if spec.program.kind != "module" else target
        name = propose_name(word) or "job"
    suffix = len(POD_SUFFIXES[options.kind].format(spec.resources.nodes - 1))
    if options.scheduler is not None:
        suffix = max(suffix, len(SCHEDULER_SUFFIX))
    if len(name) + suffix > MAX_LABEL_LENGTH:
        shorter = name[: MAX_LABEL_LENGTH - suffix].rstrip("-")
        raise UsageError(
            f"{name} is too long: with a pod's index, a host name has more than "
            f"{MAX_LABEL_LENGTH} characters",
            where=where,
            hint=f"use {quote_command('--name', shorter)}",
        )
    return name


POD_SUFFIXES: dict[Kind, str] = {
    "job": "-{}",
    "pdjob": "-{}",
    "jobset": "-node-0-{}",
    "lws": "-0-{}",
    "volcano": "-node-{}",
    "pytorchjob": "-worker-{}",
}
"""What follows the name of the job in the host name of a pod."""
SCHEDULER_SUFFIX = "-scheduler"
"""The same, of the scheduler's own pod."""


def device_limit(spec: JobSpec) -> tuple[str, str] | None:
    """
    Return (resource, quantity) of the accelerators of a pod; None: it asks for none.

    ``--devices N`` without a backend asks for N GPUs of NVIDIA, the most frequent case.

    Raises:
        UsageError: the backend has accelerators, but their number is left to the pod.
    """
    count = spec.resources.devices
    backend = spec.resources.backend
    if backend in ("cpu", "mps"):
        return None
    if isinstance(count, int):
        return DEVICE_RESOURCES["cuda" if backend == "auto" else backend], str(count)
    if backend == "auto":
        return None
    raise UsageError(
        f"needs the number of devices per pod for {DEVICE_RESOURCES[backend]}",
        where="--backend",
        hint="add --devices N",
    )


def merge_pairs(pairs: Sequence[tuple[str, str]], where: str) -> dict[str, str]:
    """Return pairs as a mapping; a key that is given twice raises UsageError."""
    merged: dict[str, str] = {}
    for key, value in pairs:
        if key in merged:
            raise UsageError(f"{key} is given twice", where=where, hint="leave one of them out")
        merged[key] = value
    return merged
