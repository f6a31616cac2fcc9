"""
One operator of a namespace writes: the one that holds the Lease (coordination.k8s.io/v1).

Another one takes over when the holder has not renewed for the Lease's duration. The time is
measured here, from the moment at which a renewal was seen, so clocks may differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from pdrun.errors import RendezvousError
from pdrun.launcher.k8s.operator.api import KubernetesApi
from pdrun.launcher.k8s.operator.crd import OPERATOR_NAME
from pdrun.launcher.k8s.pod import Manifest

DURATION_SECONDS = 15
RENEW_SECONDS = 5.0
MAX_SILENCE_SECONDS = 12.0
"""Without a renewal for so long this operator stops: shorter than the duration."""


class OperatorLease:
    """
    The right to write.

    Args:
        api: the namespace.
        identity: name of this operator's pod.
    """

    def __init__(self, api: KubernetesApi, identity: str) -> None:
        self._api = api
        self._identity = identity
        self._renewed = 0.0
        self._seen: tuple[str, float] = ("", 0.0)
        """Last renewal of another holder, and when it was seen."""

    def acquire(self, stopped: threading.Event, report: Callable[[str], object]) -> None:
        """Wait until this operator holds the lease, or ``stopped`` is set."""
        has_reported = False
        while not stopped.is_set() and not self._try():
            if not has_reported:
                report("another operator holds the lease; waiting for it")
                has_reported = True
            stopped.wait(RENEW_SECONDS / 5)

    def renew_if_due(self) -> None:
        """
        Renew the lease every `RENEW_SECONDS`.

        Raises:
            RendezvousError: another operator has it, or the server was silent for too long.
        """
        now = time.monotonic()
        if now - self._renewed < RENEW_SECONDS:
            return
        try:
            is_held = self._try()
        except RendezvousError:
            if time.monotonic() - self._renewed > MAX_SILENCE_SECONDS:
                raise
            return
        if not is_held:
            raise RendezvousError("another operator has taken the lease", where=self._identity)

    def _try(self) -> bool:
        """Take or renew the lease; return whether this operator holds it."""
        began = time.monotonic()
        lease = self._api.get("Lease", OPERATOR_NAME)
        if lease is None:
            is_held = self._api.create(self._make(None))
        elif lease["spec"].get("holderIdentity") == self._identity or self._has_expired(lease):
            is_held = self._api.replace(self._make(lease))
        else:
            is_held = False
        if is_held:
            self._renewed = began
        return is_held

    def _has_expired(self, lease: Manifest) -> bool:
        renewal = str(lease["spec"].get("renewTime"))
        if renewal != self._seen[0]:
            self._seen = (renewal, time.monotonic())
        duration = float(lease["spec"].get("leaseDurationSeconds") or DURATION_SECONDS)
        return time.monotonic() - self._seen[1] > duration

    def _make(self, old: Manifest | None) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Manifest = dict(old["spec"]) if old else {"acquireTime": now, "leaseTransitions": 0}
        if old and spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["holderIdentity"] = self._identity
        spec["leaseDurationSeconds"] = DURATION_SECONDS
        spec["renewTime"] = now
        metadata: Manifest = {"name": OPERATOR_NAME, "namespace": self._api.namespace}
        if old:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
