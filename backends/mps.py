"""
Apple's GPU (Metal): one a machine, part of the processor. Collectives go through gloo, by way of
the CPU.
"""

from __future__ import annotations

from pdrun.backends.base import Backend, Found, Search, Surroundings


def _search(here: Surroundings) -> Search:
    if here.platform != "darwin":
        return Search((), "only on a Mac")
    if here.machine != "arm64":
        return Search((), f"only on Apple's own processors, this is {here.machine}")
    return Search((Found(""),), "Apple processor")


BACKEND = Backend(
    name="mps",
    title="Apple GPU (Metal)",
    variables=(),
    torch_device="mps",
    collective="gloo",
    search=_search,
    indexed=False,
)
