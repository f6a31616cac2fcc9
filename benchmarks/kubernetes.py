"""
What Kubernetes costs: reconciling 1,000 jobs of two pods, and rendering one job.

    python benchmarks/kubernetes.py

Prints CPU seconds. No cluster is needed: reconciling is pure, rendering prints text.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from typing import Any

from pdrun.launcher.cli.clusters.k8s_operator import read_run_words
from pdrun.launcher.k8s.operator.job_request import read_job
from pdrun.launcher.k8s.operator.reconcile import Create, reconcile

JOBS = 1_000
NODES = 2
RENDERS = 10
NOW = "2026-01-01T00:00:00Z"


def make_job(index: int) -> dict[str, Any]:
    """Return a PdJob."""
    return {
        "metadata": {"name": f"train-{index}", "uid": f"u-{index}", "generation": 1},
        "spec": {"image": "i", "run": ["--devices", "8", "train.py"], "nodes": NODES},
    }


def measure_reconcile() -> tuple[float, float]:
    """Return CPU seconds of reading all jobs once, and of a pass over all that run."""
    jobs = [make_job(index) for index in range(JOBS)]
    began = time.process_time()
    requests = [read_job(job, read_run_words) for job in jobs]
    read = time.process_time() - began
    pods = []
    for job, request in zip(jobs, requests, strict=True):
        actions = reconcile(job, request, [], token="t", now=NOW)
        made = [one.body for one in actions if isinstance(one, Create)]
        own = [body for body in made if body["kind"] == "Pod"]
        for body in own:
            body["status"] = {"phase": "Running"}
        job["status"] = {"state": "Running", "nodes": NODES, "startTime": NOW}
        job["status"]["observedGeneration"] = 1
        pods.append(own)
    began = time.process_time()
    written = 0
    for job, request, own in zip(jobs, requests, pods, strict=True):
        written += len(reconcile(job, request, own, token="t", now=NOW))
    if written:
        raise SystemExit(f"{written} writes for jobs that are as they should be")
    return read, time.process_time() - began


def measure_render() -> float:
    """Return CPU seconds of `pdrun k8s render`, the mean of several."""
    command = [sys.executable, "-m", "pdrun", "k8s", "render", "--image", "i", "--nodes", "2"]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(RENDERS):
        subprocess.run([*command, "train.py"], stdout=subprocess.DEVNULL, check=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    return spent / RENDERS


def main() -> None:
    """Print the figures."""
    read, loop = measure_reconcile()
    print(f"read {JOBS} jobs once     {read:.2f} s")
    print(f"pass over {JOBS} jobs     {loop:.2f} s")
    print(f"pdrun k8s render        {measure_render():.3f} s")


if __name__ == "__main__":
    main()
