"""Searched plans of many models compute what one process does, and send what is planned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lib.tiers import by_tier, thorough
from tests.parallel.auto import planned_models
from tests.parallel.auto.rank_runs import TOPOLOGIES

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("tests.parallel.auto.planned_models", *by_tier((), ("transformers",)))
MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"tp": 2}, 1),
    ({"tp": 4}, 1),
    ({"x": 2, "y": 2}, 1),
    ({"dp": 2, "tp": 2}, 1),
    ({"tp": 2}, 2),
)
"""Degrees, and stages."""
QUICK = {("residual", "node", 0), ("lstm", "free", 0), ("vision", "node", 4)}


def list_cases() -> Iterator[Any]:
    """Yield every model on every topology and mesh."""
    for name, topology, place in itertools.product(
        planned_models.MODELS, TOPOLOGIES, range(len(MESHES))
    ):
        degrees, stages = MESHES[place]
        if stages > 1 and not planned_models.MODELS[name].has_stages:
            continue
        case = name, topology, degrees, stages
        text = "-".join([name, topology, *(f"{axis}{size}" for axis, size in degrees.items())])
        text += f"-pp{stages}"
        if (name, topology, place) in QUICK:
            yield pytest.param(*case, id=text)
        else:
            yield thorough(*case, id=text)


@pytest.mark.parametrize(("name", "topology", "degrees", "stages"), list(list_cases()))
def test_searched_plan_is_right_and_sends_what_is_planned(
    worlds: Any, name: str, topology: str, degrees: dict[str, int], stages: int
) -> None:
    world = math.prod(degrees.values()) * stages
    found = worlds(world).run(planned_models.verify_model, name, topology, degrees, stages)
    assert all(one["operators"] == found[0]["operators"] for one in found)
    if topology == "free":
        assert any(entry != "replicated" for entry in found[0]["operators"].values())
    if stages == 1:
        for one in found:
            assert one["counted"] == one["planned"]
