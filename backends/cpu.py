"""The CPU: one "device" that all workers share; `affinity` distributes its cores."""

from __future__ import annotations

from pdrun.backends.base import Backend, DetectedDevice, ProbeEnvironment, SearchResult


def _find_devices(_: ProbeEnvironment) -> SearchResult:
    return SearchResult((DetectedDevice(""),), "always available")


BACKEND = Backend(
    name="cpu",
    title="CPU",
    variables=(),
    torch_device="cpu",
    collective="gloo",
    search=_find_devices,
    has_indices=False,
)
