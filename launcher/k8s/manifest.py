"""
The objects of a job, as data. Pure: the same request gives the same objects.

    job          Secret, headless Service, indexed Job, and a Job for a scheduler's pod
    jobset       Secret, JobSet (it makes the service)
    pdjob        PdJob, for pdrun's own operator
    lws          Secret, LeaderWorkerSet
    volcano      Secret, Job of Volcano with its svc and env plug-ins
    pytorchjob   Secret, PyTorchJob of Kubeflow's training operator

Restarts are pdrun's: the agents stay in their pods, and workers start again there. A pod ends with
the verdict on the job. So an indexed Job makes a pod again only if the pod was lost, and only in an
elastic job, whose other nodes go on; a job of fixed size has ended by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import yaml

from pdrun.errors import UsageError
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.options import drop_options
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.k8s.options import (
    Kind,
    KubernetesOptions,
    check_request,
    choose_name,
)
from pdrun.launcher.k8s.overlay import apply_overlay
from pdrun.launcher.k8s.pod import (
    JOB_LABEL,
    TOKEN_KEY,
    Manifest,
    PodRequest,
    container_of,
    make_template,
    object_labels,
)
from pdrun.launcher.k8s.scheduler_pod import (
    check_scheduler,
    make_scheduler_template,
    max_lost_pods,
    node_words,
    scheduler_name,
    scheduler_service_body,
)

API_VERSION, KIND = "pdrun.dev/v1", "PdJob"
"""Of the operator's objects (`pdrun.launcher.k8s.operator.crd`)."""
LOST_POD_EXIT_CODES = (137, 143)
"""Exit codes of a pod that was killed or deleted: SIGKILL and SIGTERM."""
MAX_LOST_SCHEDULERS = 10
"""How often a scheduler's pod is made again."""
RESOURCE_NAMES: Mapping[Kind, str] = {
    "job": "jobs.batch",
    "pdjob": "pdjobs.pdrun.dev",
    "jobset": "jobsets.jobset.x-k8s.io",
    "lws": "leaderworkersets.leaderworkerset.x-k8s.io",
    "volcano": "jobs.batch.volcano.sh",
    "pytorchjob": "pytorchjobs.kubeflow.org",
}
"""Kind -> plural name with the group, as kubectl knows it."""


def make_manifests(
    resolved: ResolvedSpec,
    words: Sequence[str],
    options: KubernetesOptions,
    token: str,
    overlay: Manifest | None = None,
) -> list[Manifest]:
    """
    Return the objects of a job, the job itself last.

    Args:
        resolved: what ``words`` request.
        words: the arguments of ``pdrun run`` in every pod.
        options: what is asked of Kubernetes.
        token: the job's secret, in the format of `pdrun.rendezvous.protocol.security`.
        overlay: what `pdrun.launcher.k8s.overlay.read_overlay` returned.

    Raises:
        UsageError: an option has no meaning in pods, or contradicts another one.
    """
    check_request(resolved)
    check_scheduler(options)
    spec = resolved.spec
    if spec.program.kind == "function":
        raise UsageError("a function cannot be sent to pods", hint="give a script of the image")
    name = choose_name(options, spec)
    secret = options.secret or f"{name}-token"
    request = PodRequest(name, spec, options, tuple(words), secret)
    template = make_node_template(request)
    if options.kind == "pdjob":
        return [_make_pdjob(request, template, overlay or {})]
    if overlay:
        template = apply_overlay(template, overlay)
    objects = []
    if not options.secret:
        objects.append(_make_secret(request, token))
    if options.kind == "job":
        objects.append(make_service(request))
    if options.scheduler:
        objects.append(make_scheduler_service(request))
        objects.append(_make_scheduler_job(request, token, overlay or {}))
    objects.append(_MAKERS[options.kind](request, template))
    return objects


def make_node_template(request: PodRequest) -> Manifest:
    """Return the template of the pods that are nodes."""
    words = (*node_words(request.name, request.options), *request.words)
    return make_template(replace(request, words=words))


def make_scheduler_service(request: PodRequest) -> Manifest:
    """Return the Service whose address the nodes keep when the scheduler's pod is made again."""
    name = scheduler_name(request.name)
    return _make_object(request, "v1", "Service", scheduler_service_body(request.name), name)


def _make_scheduler_job(request: PodRequest, token: str, overlay: Manifest) -> Manifest:
    """Return the Job that keeps one scheduler; a verdict ends it, a lost pod does not."""
    body: Manifest = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": MAX_LOST_SCHEDULERS,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [_ignore_disruptions(), _fail_at_verdict(LOST_POD_EXIT_CODES[0])]
        },
        "template": make_scheduler_template(request, token, overlay),
    }
    if request.options.ttl is not None:
        body["ttlSecondsAfterFinished"] = request.options.ttl
    name = scheduler_name(request.name)
    return _make_object(request, "batch/v1", "Job", {"spec": body}, name)


def _ignore_disruptions() -> Manifest:
    """Return the rule that an eviction is not the job's fault."""
    return {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def _fail_at_verdict(*lost: int) -> Manifest:
    """Return the rule that every code but those is the verdict on the job."""
    return {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": "pdrun",
            "operator": "NotIn",
            "values": list(lost),
        },
    }


def _make_object(
    request: PodRequest, version: str, kind: str, body: Manifest, name: str = ""
) -> Manifest:
    metadata: Manifest = {"name": name or request.name}
    if request.options.namespace:
        metadata["namespace"] = request.options.namespace
    metadata["labels"] = object_labels(request.name, request.options)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _make_secret(request: PodRequest, token: str) -> Manifest:
    body = {"type": "Opaque", "stringData": {TOKEN_KEY: token}}
    return _make_object(request, "v1", "Secret", body, request.secret)


def make_service(request: PodRequest) -> Manifest:
    """
    Return the headless Service that gives the pods their names.

    A pod's name must exist before the pod is ready: pdrun meets before it is.
    """
    body = {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: request.name},
        }
    }
    return _make_object(request, "v1", "Service", body)


def _make_job(request: PodRequest, template: Manifest) -> Manifest:
    spec: Manifest = _job_body(request, template)
    if request.options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = request.options.ttl
    return _make_object(request, "batch/v1", "Job", {"spec": spec})


def _job_body(request: PodRequest, template: Manifest) -> Manifest:
    """Return the spec of an indexed Job with one pod per node."""
    nodes = request.spec.resources.max_members
    rules = [_ignore_disruptions()]
    lost_pods = max_lost_pods(request.spec, request.options)
    if lost_pods:
        rules.append(_fail_at_verdict(*LOST_POD_EXIT_CODES))
    return {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": lost_pods,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }


def _make_jobset(request: PodRequest, template: Manifest) -> Manifest:
    spec: Manifest = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": request.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {"spec": _job_body(request, template)},
            }
        ],
    }
    if request.options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = request.options.ttl
    del template["spec"]["subdomain"]  # JobSet sets it
    return _make_object(request, "jobset.x-k8s.io/v1alpha2", "JobSet", {"spec": spec})


def _make_leader_worker_set(request: PodRequest, template: Manifest) -> Manifest:
    _refuse_elastic(request)
    template["spec"]["restartPolicy"] = "Always"  # a StatefulSet accepts no other
    del template["spec"]["subdomain"]  # its own service has another name
    body = {
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": request.spec.resources.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
        }
    }
    _refuse_ttl(request)
    return _make_object(request, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", body)


def _make_volcano_job(request: PodRequest, template: Manifest) -> Manifest:
    resources = request.spec.resources
    template["spec"]["schedulerName"] = "volcano"
    del template["spec"]["subdomain"]  # the svc plug-in sets it
    spec: Manifest = {
        "schedulerName": "volcano",
        "minAvailable": resources.required_nodes,
        "maxRetry": 1,
        "plugins": {"svc": [], "env": []},
        "policies": [
            {"event": "PodFailed", "action": "AbortJob"},
            {"event": "PodEvicted", "action": "AbortJob"},
        ],
        "tasks": [{"name": "node", "replicas": resources.max_members, "template": template}],
    }
    if request.options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = request.options.ttl
    return _make_object(request, "batch.volcano.sh/v1alpha1", "Job", {"spec": spec})


def _make_pytorch_job(request: PodRequest, template: Manifest) -> Manifest:
    _refuse_elastic(request)
    nodes = request.spec.resources.nodes
    container_of(template)["name"] = "pytorch"  # the operator sets variables in this container only
    del template["spec"]["subdomain"]  # the operator makes a service per pod
    del template["spec"]["restartPolicy"]  # the operator sets that of the replica
    replicas: Manifest = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}}
    if nodes > 1:
        replicas["Worker"] = {**replicas["Master"], "replicas": nodes - 1}
    policy: Manifest = {"cleanPodPolicy": "None", "backoffLimit": 0}
    if request.options.ttl is not None:
        policy["ttlSecondsAfterFinished"] = request.options.ttl
    body = {"spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas}}
    return _make_object(request, "kubeflow.org/v1", "PyTorchJob", body)


def _refuse_elastic(request: PodRequest) -> None:
    if request.spec.resources.is_elastic:
        raise UsageError(
            f"a {request.options.kind} has a fixed number of pods",
            where="--nodes",
            hint="use --kind job",
        )


def _refuse_ttl(request: PodRequest) -> None:
    if request.options.ttl is not None:
        raise UsageError(f"--kind {request.options.kind} has none", where="--ttl")


def _make_pdjob(request: PodRequest, template: Manifest, overlay: Manifest) -> Manifest:
    """Return the object of the operator, which makes the pods' template itself."""
    options, resources = request.options, request.spec.resources
    own = container_of(template)
    container = {key: own[key] for key in ("resources", "volumeMounts") if key in own}
    pod: Manifest = {
        "spec": {
            "containers": [{"name": own["name"], **container}],
            "volumes": template["spec"]["volumes"],
        }
    }
    if options.labels:
        pod["metadata"] = {"labels": dict(options.labels)}
    spec: Manifest = {"nodes": resources.max_members}
    if resources.is_elastic:
        spec |= {"minNodes": resources.required_nodes, "maxNodes": resources.max_members}
    spec |= {
        "image": options.image,
        "run": drop_nodes(request.words),
        "pod": apply_overlay(pod, overlay),
    }
    if options.secret:
        spec["secret"] = options.secret
    if options.scheduler is not None:
        spec["scheduler"] = {"claim": options.scheduler.claim, "path": options.scheduler.path}
    if options.ttl is not None:
        spec["ttlSeconds"] = options.ttl
    return _make_object(request, API_VERSION, KIND, {"spec": spec})


def drop_nodes(words: Sequence[str]) -> list[str]:
    """Return the words of ``pdrun run`` without the number of nodes, under any of its names."""
    return drop_options(words, (*RUN_OPTIONS, *ALIAS_OPTIONS), ("--nodes", "--nnodes"))


_MAKERS: Mapping[Kind, Callable[[PodRequest, Manifest], Manifest]] = {
    "job": _make_job,
    "jobset": _make_jobset,
    "lws": _make_leader_worker_set,
    "volcano": _make_volcano_job,
    "pytorchjob": _make_pytorch_job,
}


class _PlainDumper(yaml.SafeDumper):
    """Writes every occurrence of an object in full: no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def format_manifests(objects: Sequence[Manifest]) -> str:
    """Return the objects as YAML, one document each."""
    return yaml.dump_all(
        objects,
        Dumper=_PlainDumper,
        sort_keys=False,
        explicit_start=True,
        width=100,
        allow_unicode=False,
    )


def format_json(objects: Sequence[Manifest]) -> str:
    """Return the objects as one List, for ``kubectl apply``."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
