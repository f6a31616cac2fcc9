"""Apple's GPU (Metal): one per machine. Collectives use gloo and the CPU."""

from __future__ import annotations

from pdrun.backends.base import Backend, DetectedDevice, ProbeEnvironment, SearchResult


def _find_devices(here: ProbeEnvironment) -> SearchResult:
    if here.platform != "darwin":
        return SearchResult((), "only on a Mac")
    if here.machine != "arm64":
        return SearchResult((), f"only on Apple processors, this is {here.machine}")
    return SearchResult((DetectedDevice(""),), "Apple processor")


BACKEND = Backend(
    name="mps",
    title="Apple GPU (Metal)",
    variables=(),
    torch_device="mps",
    collective="gloo",
    search=_find_devices,
    has_indices=False,
)
