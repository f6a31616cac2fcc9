"""What the commands of ``pdrun k8s`` do that ask a cluster; imported when one of them runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdrun.errors import PdrunError, UsageError
from pdrun.launcher.cli.clusters.k8s_request import read_request
from pdrun.launcher.cli.run import print_warnings
from pdrun.launcher.common import parsers
from pdrun.launcher.k8s import cluster, logs, manifest, pods
from pdrun.launcher.k8s import options as k8s_options
from pdrun.launcher.k8s.kubectl import Kubectl
from pdrun.launcher.k8s.pod import CONTAINER_NAME, JOB_LABEL
from pdrun.rendezvous.protocol.security import Secret, format_token
from pdrun.text import quote_command

NEEDED_RIGHTS = (
    ("create", "secrets"),
    ("create", "services"),
    ("list", "pods"),
    ("get", "pods", "--subresource=log"),
)
"""Verb and resource of what `submit`, `status` and `logs` need, in addition to the job itself."""
STATUS_SECONDS = 15.0
"""Time limit of the question that is asked inside a pod."""


def submit_job(words: tuple[str, ...]) -> int:
    """Create a job; print its name."""
    request = read_request(words)
    objects = request.make_manifests(format_token(Secret.random()))
    print_warnings(request.warnings)
    kubectl = Kubectl(request.options.namespace, request.context)
    cluster.submit_objects(kubectl, request.options.kind, objects)
    name = objects[-1]["metadata"]["name"]
    place = _place_words(request.options.namespace, request.context)
    command = quote_command("pdrun", "k8s", "logs", "--follow", *place, name)
    print(f"pdrun: submitted {name}; to see its output: {command}", file=sys.stderr)
    print(name)
    return 0


def _place_words(namespace: str, context: str) -> list[str]:
    words = ["--namespace", namespace] if namespace else []
    return [*words, "--context", context] if context else words


def print_status(name: str, json: bool, namespace: str, context: str) -> int:
    """Print the state of a job and its pods, or one line per job."""
    kubectl = Kubectl(namespace, context)
    found = [cluster.find_job(kubectl, name)] if name else cluster.list_jobs(kubectl)
    selector = f"{JOB_LABEL}={name}" if name else JOB_LABEL
    items = kubectl.list_items("pods", "-l", selector)
    states = []
    for job in found:
        own = pods.read_pods(
            item for item in items if item["metadata"]["labels"].get(JOB_LABEL) == job.name
        )
        nodes = count_nodes(job)
        states.append((job, own, _read_operator(job) or pods.summarize_job(own, nodes)))
    if json:
        print(_format_json(states))
        return 0
    if not states:
        print("pdrun: no jobs of pdrun in this namespace", file=sys.stderr)
    for job, own, summary in states:
        print(f"{job.name}: {summary}")
        if name:
            sys.stdout.write(pods.format_pods(own))
            _print_own_words(kubectl, job, own)
    return 0


def _read_operator(job: cluster.SubmittedJob) -> str:
    """Return what the operator says of a job that has not begun or has ended; else nothing."""
    status = job.body.get("status") or {}
    state = str(status.get("state") or "")
    if state in ("", "Running"):
        return ""
    if state == "Succeeded":
        return "done"
    reason = status.get("reason")
    return f"{state.lower()}: {reason}" if reason else state.lower()


def _format_json(states: Sequence[tuple[cluster.SubmittedJob, list[pods.PodState], str]]) -> str:
    return json.dumps(
        [
            {"name": job.name, "kind": job.kind, "state": summary, "pods": pods.to_json(own)}
            for job, own, summary in states
        ],
        indent=1,
    )


def _print_own_words(
    kubectl: Kubectl, job: cluster.SubmittedJob, own: Sequence[pods.PodState]
) -> None:
    """Print what pdrun itself says in the first pod that runs."""
    running = [pod for pod in own if pod.phase == "Running" and not pod.is_leaving and not pod.role]
    if running:
        text = logs.read_job_status(
            kubectl, running[0].name, container_name(job.kind), STATUS_SECONDS
        )
        if text.strip():
            print(text.rstrip())


def container_name(kind: k8s_options.Kind) -> str:
    """Return the name of pdrun's container."""
    return "pytorch" if kind == "pytorchjob" else CONTAINER_NAME


def count_nodes(job: cluster.SubmittedJob) -> int:
    """Return how many pods a job has, by its object."""
    spec: Mapping[str, Any] = job.body.get("spec") or {}
    if job.kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if job.kind == "pdjob":
        return int(spec.get("nodes") or 1)
    if job.kind == "lws":
        return int(spec["leaderWorkerTemplate"]["size"])
    if job.kind == "volcano":
        return sum(int(task.get("replicas", 1)) for task in spec["tasks"])
    if job.kind == "pytorchjob":
        return sum(int(one.get("replicas", 1)) for one in spec["pytorchReplicaSpecs"].values())
    return int(spec.get("parallelism") or 1)


def print_logs(name: str, follow: bool, tail: str, pod: str, namespace: str, context: str) -> int:
    """Print the output of a job's pods; 1 if the log of a pod could not be read."""
    lines = parsers.int_parser(0)(tail, "--tail") if tail else None
    kubectl = Kubectl(namespace, context)
    job = cluster.find_job(kubectl, name)

    def write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        if follow:
            sys.stdout.buffer.flush()

    sys.stdout.flush()
    reader = logs.PodLogs(kubectl, name, write, container=container_name(job.kind), tail=lines)
    if pod and pod not in {known for one in reader.list_pods() for known in (one.name, one.index)}:
        raise UsageError(f"{name} has no pod {pod}", where="--pod")
    reader.print_all(follow=follow, only=pod)
    sys.stdout.buffer.flush()
    for failed, reason in reader.failures.items():
        print(f"pdrun: warning: {failed}: {reason}", file=sys.stderr)
    return 1 if reader.failures else 0


def stop_job(name: str, namespace: str, context: str) -> int:
    """Delete a job and wait until its pods are gone."""
    kubectl = Kubectl(namespace, context)
    job = cluster.find_job(kubectl, name)
    items = kubectl.list_items("pods", "-l", f"{JOB_LABEL}={name}")
    graces = [item["spec"].get("terminationGracePeriodSeconds", 30) for item in items]
    cluster.delete_job(kubectl, job, float(max(graces, default=30)))
    print(f"pdrun: {name} was deleted, with its pods", file=sys.stderr)
    return 0


def print_env(namespace: str, context: str) -> int:
    """Print what the cluster has for pdrun, and what the user may do."""
    kubectl = Kubectl(namespace, context)
    if not context:
        current = _ask(lambda: kubectl.run("config", "current-context").strip())
        context = current or "none"
    print(f"context    {context}")
    print(f"namespace  {namespace or _current_namespace(kubectl)}")
    print(f"server     {cluster.server_version(kubectl)}")
    known = cluster.list_kinds(kubectl)
    for kind in k8s_options.KINDS:
        resource = manifest.RESOURCE_NAMES[kind]
        state = "yes" if kind in known else "no"
        if kind == "job" and kind in known and not cluster.has_indexed_jobs(kubectl):
            state = "no: the server has no indexed Jobs"
        elif kind in known and not kubectl.succeeds("auth", "can-i", "create", resource):
            state = f"not allowed: create {resource}"
        print(f"{kind:<11}{state}")
    for words in NEEDED_RIGHTS:
        if not kubectl.succeeds("auth", "can-i", *words):
            print(f"not allowed: {' '.join(words)}")
    return 0


def _current_namespace(kubectl: Kubectl) -> str:
    return (
        _ask(
            lambda: kubectl.run(
                "config", "view", "--minify", "-o", "jsonpath={.contexts[0].context.namespace}"
            ).strip()
        )
        or "default"
    )


def _ask(question: Callable[[], str]) -> str:
    try:
        return question()
    except PdrunError:
        return ""
