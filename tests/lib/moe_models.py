"""A decoder with experts, and what the ranks do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.parallel.comm import mesh as meshes

WORDS, DIM, HIDDEN, LENGTH = 29, 16, 24, 6


class Block(nn.Module):
    """A product over positions, then experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.moe = pdrun.MoE(DIM, HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).cumsum(1) / LENGTH
        return x + self.moe(self.norm(x))


class Decoder(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block(**options) for _ in range(layers))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    """The sum over tokens, and their number."""
    wanted = batch.roll(-1, 1)
    scores = output.flatten(0, 1).float()  # a sum in bf16 would be coarse
    return F.cross_entropy(scores, wanted.flatten(), reduction="sum"), wanted.numel()


@dataclass(frozen=True)
class MoECase:
    """A model, a mesh and arguments of parallelize."""

    mesh: dict[str, int]
    axis: Any = "ep"
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 8
    steering: str = ""
    """ "one": every token goes to expert 0; "none": none to the experts of the last rank."""
    stages: int = 1
    microbatches: int = 2


def build_decoder(case: MoECase) -> Decoder:
    """Return the model of a case, the same on every rank."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"experts": 4, "top_k": 2, **case.model}
    model = Decoder(**options)
    with torch.no_grad():
        for layer in model.layers:
            if case.steering:
                # norms have no bias that a weight could not answer: the router sees a constant
                layer.norm.bias[0] = 8.0
                layer.norm.weight[0] = 0.0
                kept = 1 if case.steering == "one" else options["experts"] // 2
                layer.moe.router.weight[:, 0] = -50.0
                layer.moe.router.weight[:kept, 0] = 50.0
    return model


def batches(case: MoECase, count: int = 3) -> list[Tensor]:
    """Return some batches."""
    made = torch.Generator().manual_seed(5)
    return [torch.randint(0, WORDS, (case.rows, LENGTH), generator=made) for _ in range(count)]


def make_run(case: MoECase, world: int) -> Any:
    """Return the run of a case on this rank."""
    torch.use_deterministic_algorithms(False)
    strategy = None
    if case.axis:
        strategy = pdrun.Strategy({"layers.*.moe": pdrun.experts(case.axis)})
    pipeline = None
    if case.stages > 1:
        pipeline = pdrun.Pipeline(microbatches=case.microbatches)
    return pdrun.parallelize(
        build_decoder(case),
        lambda params: torch.optim.AdamW(params, 1e-2),
        token_loss,
        mesh=meshes.solve_mesh(world, dict(case.mesh)),
        strategy=strategy,
        pipeline=pipeline,
        norm=True,
        **case.options,
    )


def train_case(case: MoECase, world: int, prove: bool = False, folder: str = "") -> Any:
    """Train three steps; return losses, norms, loads, and the sums of all weights."""
    run = make_run(case, world)
    if prove:
        run.verify(batches(case, 1))
    told = []
    for batch in batches(case):
        made = run.step(batch)
        loads = {name: (each.load_max, each.dropped) for name, each in made.experts.items()}
        told.append((made.loss, made.grad_norm, loads))
    if folder:
        run.save(folder)
    weights = {name: value.double().sum().item() for name, value in run.full_weights().items()}
    return told, weights


def resume_case(case: MoECase, world: int, folder: str) -> Any:
    """Take a saved run up; return the weights and two more steps."""
    run = make_run(case, world)
    run.resume(folder)
    weights = {name: value.double().sum().item() for name, value in run.full_weights().items()}
    told = [run.step(batch) for batch in batches(case, 2)]
    return weights, [(made.loss, made.grad_norm) for made in told]


__all__ = ["Decoder", "MoECase", "Path", "batches", "make_run", "resume_case", "train_case"]
