"""A small model with experts, and what the ranks of the tests do with its plans."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from pdrun.parallel.auto.auto import Auto
from pdrun.parallel.experts.dispatch import ROWS_NAME
from pdrun.parallel.experts.moe import MoE
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from tests.parallel.auto.random_graphs import make_topology

WORDS, DIM, HIDDEN, EXPERTS, TOP_K = 24, 16, 128, 4, 2
LAYERS, ROWS, LENGTH = 4, 4, 4
TOPOLOGY = make_topology(1e12, 1e12, 1e-5, 1e-9, 1e9)
"""Sums of gradients cost more than tokens that travel, and so do micro-batches."""


class ExpertBlock(nn.Module):
    """Experts behind a norm."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.moe = MoE(dim, hidden, experts=experts, top_k=top_k, shared=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return x + self.moe(self.norm(x))


class ExpertModel(nn.Module):
    """An embedding, layers of experts, and a head."""

    def __init__(
        self,
        dim: int = DIM,
        hidden: int = HIDDEN,
        experts: int = EXPERTS,
        top_k: int = TOP_K,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, dim)
        self.layers = nn.ModuleList(ExpertBlock(dim, hidden, experts, top_k) for _ in range(layers))
        self.head = nn.Linear(dim, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """Return a loss in which every element of a row counts differently, and the rows."""
    weight = torch.linspace(0.5, 1.5, output[0].numel()).view(output[0].shape)
    return (output * output * weight).sum(), len(batch)


def expert_batch(rows: int = ROWS) -> Tensor:
    """Return tokens, the same on every rank."""
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def make_expert_run(mesh: Any, strategy: Any, **options: Any) -> Run:
    """Return a run of the small model."""
    torch.manual_seed(0)
    return parallelize(
        ExpertModel(),
        lambda params: torch.optim.Adam(params, lr=0.01),
        squares,
        mesh=mesh,
        strategy=strategy,
        sample=expert_batch(),
        **options,
    )


def search_mesh(path: str) -> dict[str, Any]:
    """Search mesh and strategy, verify, count what a pass sends, and save the plan."""
    run = make_expert_run("auto", Auto(topology=TOPOLOGY))
    run.verify([expert_batch()])
    assert "experts" in run.explain()
    if run.context.rank == 0:
        run.plan.save(path)
    part = expert_batch()[: ROWS // run.mesh.row_parts]
    run.axes.reset_counts()
    squares(run.model(part), part)[0].backward()
    memory = run.memory()
    return {
        "plan": json.loads(run.plan.to_json()),
        "sent": sum(
            count.nbytes
            for (name, axes), count in run.axes.counts.items()
            if name == ROWS_NAME and axes == ("ep",)
        ),
        "memory": {"weights": memory.weights, "state": memory.state},
    }


def run_plan(path: str) -> dict[str, Any]:
    """Make a run from a plan file, verify and train it, and return its plan."""
    run = make_expert_run(path, path)
    run.verify([expert_batch()])
    before = run.step(expert_batch()).loss
    after = run.step(expert_batch()).loss
    assert after < before
    return dict(json.loads(run.plan.to_json()))


def run_given_mesh(degrees: dict[str, int]) -> dict[str, Any]:
    """Run ``strategy="auto"`` on a mesh with ep."""
    from pdrun.parallel.comm.mesh import mesh

    run = make_expert_run(mesh(**degrees), "auto")
    run.verify([expert_batch()])
    return dict(json.loads(run.plan.to_json()))
