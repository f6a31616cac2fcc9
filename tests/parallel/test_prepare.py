"""All ranks start with the values of rank 0, which few messages carry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel import prepare
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class Mixed(nn.Module):
    """Weights and buffers of several types and shapes, which differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(12))
        self.narrow = nn.Parameter(torch.randn(3, 7).to(torch.bfloat16))
        self.codes = nn.Parameter(torch.randint(100, (9,), dtype=torch.int16), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(4) > 0.5, requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("eighth", torch.randn(6).to(torch.float8_e4m3fn))
        self.register_buffer("turned", torch.randn(4, 6).T)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("steps", torch.tensor(rank))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scalar


def start(group_bytes: int) -> tuple[dict[str, list[Any]], int]:
    """Return the values of this rank, and the number of messages of them."""
    before = prepare.MAX_GROUP_BYTES
    prepare.MAX_GROUP_BYTES = group_bytes
    try:
        run = parallelize(
            Mixed(torch.distributed.get_rank()),
            lambda p: torch.optim.SGD(p, 0.1),
            lambda output, batch: (output.sum(), len(output)),
        )
    finally:
        prepare.MAX_GROUP_BYTES = before
    values = {
        name: tensor.double().flatten().tolist() for name, tensor in run.model.state_dict().items()
    }
    return values, run.state.engine.place.job.calls["broadcast"]


@pytest.mark.parametrize(("group_bytes", "messages"), [(8 << 20, 6), (150, 18), (0, 32)])
def test_ranks_start_with_the_values_of_rank_0(
    group_bytes: int, messages: int, worlds: Worlds
) -> None:
    wanted = {
        name: tensor.double().flatten().tolist() for name, tensor in Mixed(0).state_dict().items()
    }
    for values, calls in worlds(2).run(start, group_bytes):
        assert values == wanted
        assert calls == messages
