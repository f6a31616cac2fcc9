"""
The CPU: always there, one "device" that all workers share; how its cores are dealt is `affinity`'s
matter.
"""

from __future__ import annotations

from pdrun.backends.base import Backend, Found, Search, Surroundings


def _search(_: Surroundings) -> Search:
    return Search((Found(""),), "always there")


BACKEND = Backend(
    name="cpu",
    title="CPU",
    variables=(),
    torch_device="cpu",
    collective="gloo",
    search=_search,
    indexed=False,
)
