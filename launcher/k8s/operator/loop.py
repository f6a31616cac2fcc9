"""
The loop of the operator: list, watch, reconcile, write.

Every change of a PdJob or of a pod leads to one pass over its job, and every `RESYNC_SECONDS` all
jobs get one: the pods are read, `reconcile` says what to write. A write that fails is tried again
by the next pass. Of several operators of a namespace, the one with the lease writes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from pdrun.errors import PdrunError, UsageError
from pdrun.launcher.k8s.manifest import KIND
from pdrun.launcher.k8s.operator.api import KubernetesApi, RefusedError
from pdrun.launcher.k8s.operator.job_request import JobRequest, WordReader, read_job
from pdrun.launcher.k8s.operator.lease import OperatorLease
from pdrun.launcher.k8s.operator.reconcile import (
    Action,
    Create,
    DeleteJob,
    DeletePod,
    SetStatus,
    reconcile,
)
from pdrun.launcher.k8s.pod import JOB_LABEL, Manifest

RESYNC_SECONDS = 10.0
RETRY_SECONDS = 1.0
"""Before a watch that has ended is begun again."""
ALL_JOBS = ""
"""In the queue: reconcile every job."""


def format_time(moment: datetime) -> str:
    """Return a time as Kubernetes writes it (RFC 3339, UTC)."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class OperatorLoop:
    """
    Keeps the jobs of one namespace.

    Args:
        api: the namespace.
        read_words: reads ``spec.run``.
        make_token: returns a new token.
        report: gets one line for each thing worth knowing.
        lease: None: this is the only operator.
    """

    def __init__(
        self,
        api: KubernetesApi,
        read_words: WordReader,
        make_token: Callable[[], str],
        report: Callable[[str], object],
        lease: OperatorLease | None = None,
    ) -> None:
        self._api = api
        self._read_words = read_words
        self._make_token = make_token
        self._report = report
        self._lease = lease
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._requests: dict[tuple[str, int], JobRequest | PdrunError] = {}

    def run(self) -> None:
        """
        Keep the jobs until `stop` is called.

        Raises:
            PdrunError: the lease was lost; nothing is written after that.
        """
        if self._lease is not None:
            self._lease.acquire(self._stopped, self._report)
        for kind in (KIND, "Pod"):
            threading.Thread(target=self._watch, args=(kind,), daemon=True).start()
        self._queue.put(ALL_JOBS)
        while not self._stopped.is_set():
            self._handle(self._wait())

    def stop(self) -> None:
        """End `run` after the pass that is going on."""
        self._stopped.set()
        self._queue.put(ALL_JOBS)

    def _wait(self) -> set[str]:
        """Return the names of the jobs that have changed, at the latest after a resync."""
        names: set[str] = set()
        deadline = time.monotonic() + RESYNC_SECONDS
        while not names and not self._stopped.is_set():
            if self._lease is not None:
                self._lease.renew_if_due()
            left = deadline - time.monotonic()
            if left <= 0:
                return {ALL_JOBS}
            with suppress(queue.Empty):
                names.add(self._queue.get(timeout=min(left, 1.0)))
        while not self._queue.empty():
            names.add(self._queue.get())
        return names

    def _handle(self, names: set[str]) -> None:
        try:
            if ALL_JOBS in names:
                self.reconcile_all()
                return
            for name in sorted(names):
                job = self._api.get(KIND, name)
                if job is not None:
                    self.reconcile_job(job, self._api.list("Pod", f"{JOB_LABEL}={name}"))
        except PdrunError as error:
            self._report(f"{error}; trying again")
            self._stopped.wait(RETRY_SECONDS)
            self._queue.put(ALL_JOBS)

    def _watch(self, kind: str) -> None:
        while not self._stopped.is_set():
            with suppress(PdrunError, ValueError):
                for found in self._api.watch(kind):
                    self._queue.put(_job_of(kind, found))
            self._stopped.wait(RETRY_SECONDS)
            self._queue.put(ALL_JOBS)  # what happened in between

    def reconcile_all(self) -> None:
        """Reconcile every job once."""
        pods: dict[str, list[Manifest]] = {}
        jobs = self._api.list(KIND)
        for pod in self._api.list("Pod", JOB_LABEL):
            pods.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod)
        known = {(job["metadata"]["uid"], job["metadata"].get("generation", 0)) for job in jobs}
        self._requests = {key: one for key, one in self._requests.items() if key in known}
        for job in jobs:
            try:
                self.reconcile_job(job, pods.get(job["metadata"]["name"], []))
            except (RefusedError, UsageError) as error:  # one job's trouble is not that of others
                self._report(str(error))

    def reconcile_job(self, job: Manifest, pods: list[Manifest]) -> None:
        """Reconcile one job once."""
        if job["metadata"].get("deletionTimestamp"):
            return  # the garbage collector takes the rest
        own = [pod for pod in pods if _is_owned(pod, job)]
        now = datetime.now(UTC)
        end = (job.get("status") or {}).get("endTime")
        since = (now - datetime.fromisoformat(end)).total_seconds() if end else 0.0
        actions = reconcile(
            job,
            self._read(job),
            own,
            token=self._make_token(),
            now=format_time(now),
            seconds_since_end=since,
        )
        for action in actions:
            self._write(job, action)

    def _read(self, job: Manifest) -> JobRequest | PdrunError:
        """Return what a job asks for; each generation of it is read once."""
        key = (job["metadata"]["uid"], job["metadata"].get("generation", 0))
        if key not in self._requests:
            try:
                self._requests[key] = read_job(job, self._read_words)
            except PdrunError as error:
                self._requests[key] = error
        return self._requests[key]

    def _write(self, job: Manifest, action: Action) -> None:
        name = str(job["metadata"]["name"])
        if isinstance(action, SetStatus):
            version = str(job["metadata"].get("resourceVersion", ""))
            if self._api.patch_status(KIND, name, action.status, version):
                self._report(f"{name}: {action.status.get('state')}")
            else:  # derived from an older object, such as before a change of scale: once more
                self._queue.put(name)
        elif isinstance(action, DeletePod):
            self._report(f"{name}: deleting pod {action.name}")
            self._api.delete("Pod", action.name, action.uid)
        elif isinstance(action, DeleteJob):
            self._report(f"{name}: deleted, its time to live is over")
            self._api.delete(KIND, name, str(job["metadata"]["uid"]))
        else:
            self._create(job, action)

    def _create(self, job: Manifest, action: Create) -> None:
        kind, name = str(action.body["kind"]), str(action.body["metadata"]["name"])
        try:
            if self._api.create(action.body):
                return
        except RefusedError as error:
            # a quota, an admission rule, a wrong overlay: the user must see it
            reason = f"{kind} {name}: {error.what}"
            self._api.patch_status(
                KIND, job["metadata"]["name"], {"state": "Pending", "reason": reason}
            )
            raise
        known = self._api.get(kind, name)
        if known is not None and not _is_owned(known, job):
            reason = f"{kind} {name} exists and is not of this job"
            self._api.patch_status(
                KIND, job["metadata"]["name"], {"state": "Pending", "reason": reason}
            )
            raise UsageError(reason, where=str(job["metadata"]["name"]))


def _job_of(kind: str, found: Manifest) -> str:
    metadata = found.get("metadata") or {}
    if kind == KIND:
        return str(metadata.get("name", ALL_JOBS))
    return str((metadata.get("labels") or {}).get(JOB_LABEL, ALL_JOBS))


def _is_owned(found: Manifest, job: Manifest) -> bool:
    owners = found["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == job["metadata"]["uid"] for owner in owners)
