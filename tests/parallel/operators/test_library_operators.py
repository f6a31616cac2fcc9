"""Operators of common models without entries for them: recurrences, writes, groups of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.parallel.comm import mesh
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class Recurrent(nn.Module):
    """Two layers of a recurrence, with a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(6, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


class Written(nn.Module):
    """Fills a new tensor part by part, as rotary embeddings of some models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        made = hidden.new_empty(hidden.shape)
        made[..., :4] = hidden[..., 4:].tanh()
        made[..., 4:] = hidden[..., :4]
        return self.head(made)


class Experts(nn.Module):
    """Rows sorted by expert, as mixtures of experts of the transformers library compute them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 6, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.gate(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0)
        member = torch.arange(len(rows)) < ends[:, None]
        first = torch.cat([torch.zeros_like(member[:1]), member[:-1]])
        sorted_rows = rows[order]
        out = torch.einsum("gs,si,gio->so", (member & ~first).float(), sorted_rows, self.weight)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(rows))
        return self.head(out[back] * scores[:, None]).view(*x.shape[:2], -1)


def loss(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, 6, generator=generator)
    return x, torch.randint(4, (rows, 3), generator=generator)


def trained(kind: Any, args: tuple[Any, ...], entries: Any) -> tuple[float, float]:
    """Return the largest differences of losses and weights from plain torch."""
    model, plain = kind(*args), kind(*args)
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.5),
        loss,
        mesh=mesh.make_mesh(tp=2),
        strategy=Operators(entries),
        sample=batch(4),
    )
    run.verify([batch(4)])
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    differences = []
    for rows in (4, 3, 1):
        total, count = loss(plain(batch(rows)[0]), batch(rows))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        differences.append(abs(run.step(batch(rows)).loss - float((total / count).detach())))
    weights = run.full_weights()
    worst = max(float((weights[k] - v).abs().max()) for k, v in plain.state_dict().items())
    return max(differences), worst


@pytest.mark.parametrize(
    ("kind", "args", "entries"),
    [
        (Recurrent, ("LSTM",), {"rnn.weight_ih_l1": L("tp", None)}),
        (Recurrent, ("GRU",), {"head.weight": L("tp", None), "rnn.gru": (L("tp", None, None),)}),
        (Written, (), {"up.weight": L("tp", None)}),
        (Experts, (), {"weight": L(None, None, "tp")}),
    ],
)
def test_the_numbers_of_one_process(
    worlds: Worlds, kind: Any, args: tuple[Any, ...], entries: Any
) -> None:
    for difference, worst in worlds(2).run(trained, kind, args, entries):
        assert difference < 1e-5 and worst < 1e-5
