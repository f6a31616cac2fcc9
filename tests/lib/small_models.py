"""Small models, a loop in plain torch, and the same loop on pdrun: what the worlds run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run

WORDS, WIDTH, LENGTH = 37, 24, 6
"""Sizes that nothing divides evenly."""


class Block(nn.Module):
    """Attention, then a perceptron."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(rows, length, WIDTH)
        )
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    """
    A language model with everything that goes wrong: ties, dropout, an unused weight, a buffer, a
    branch.
    """

    def __init__(self, tied: bool = False, p: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.blocks = nn.ModuleList(Block(p) for _ in range(layers))
        self.never = nn.Parameter(torch.ones(7))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def build(tied: bool = False, p: float = 0.0, layers: int = 3) -> Tiny:
    """Return the model with the weights of seed 0."""
    torch.manual_seed(0)
    return Tiny(tied, p, layers)


def token_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """
    Cross entropy over the targets that are not padding, as (sum, count): rows count differently.
    """
    total = F.cross_entropy(
        output.flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (batch[1] != -100).sum()


def batch_of(rows: int, step: int) -> tuple[Tensor, Tensor]:
    """
    Return ``rows`` sequences and targets, the same for equal arguments; some targets are padding.
    """
    dice = torch.Generator().manual_seed(100 * rows + step)
    words = torch.randint(WORDS, (rows, LENGTH + 1), generator=dice)
    targets = words[:, 1:].masked_fill(torch.rand(rows, LENGTH, generator=dice) < 0.2, -100)
    return words[:, :-1], targets


@dataclass(frozen=True)
class Case:
    """One point of the product that the transparency tests sample."""

    world: int = 1
    level: int = 0
    accumulate: int = 1
    recompute: str | None = None
    tied: bool = False
    dropout: bool = False
    rows: tuple[int, ...] = (24, 24, 24)
    clip: float | None = None
    optimizer: str = "AdamW"
    shard_group: int | None = None
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def slices(self) -> int:
        """How many pieces a batch is cut into."""
        return self.world * self.accumulate

    def alone(self) -> Case:
        """Return the same slices on one rank."""
        more = tuple(pair for pair in self.more if pair[0] != "gather")
        return dataclasses.replace(
            self,
            world=1,
            accumulate=self.slices,
            level=0,
            shard_group=None,
            recompute=None,
            more=more,
        )

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(changed).replace(" ", "") or "plain"


OPTIMIZERS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": functools.partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": functools.partial(torch.optim.Adamax, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=1.0),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Rprop": functools.partial(torch.optim.Rprop, lr=1e-2),
    "ASGD": functools.partial(torch.optim.ASGD, lr=1e-2),
}
Result = dict[str, Any]


def make(case: Case, **more: Any) -> Run:
    """Return a case's run."""
    model = build(case.tied, 0.1 if case.dropout else 0.0)
    return parallelize(
        model,
        OPTIMIZERS[case.optimizer],
        token_loss,
        optimizer_level=case.level,
        accumulate=case.accumulate,
        recompute=case.recompute,
        clip=case.clip,
        norm=True,
        shard_group=case.shard_group,
        seed=5,
        **{**dict(case.more), **more},
    )


def watched(run: Run) -> list[dict[str, Tensor]]:
    """Have a run write down the gradients of its last step; return where."""
    kept: list[dict[str, Tensor]] = []

    def keep(run: Run) -> None:
        kept[:] = [{name: grad.clone() for name, grad in run.gradients().items()}]

    run.watchers.append(keep)
    return kept


def train(case: Case, folder: str | None = None) -> Result:
    """
    Train on pdrun; return losses, norms, counts, and the last step's gradients.

    Args:
        folder: save into it after the second step, and go on with another run that loads it.
    """
    run = make(case)
    told = [run.step(batch_of(rows, step)) for step, rows in enumerate(case.rows[:2])]
    if folder is not None:
        run.save(folder)
        run = make(case)
        assert run.resume(folder)
    kept = watched(run)
    told += [run.step(batch_of(rows, step)) for step, rows in enumerate(case.rows[2:], 2)]
    return result(told, kept[0], run.full_weights())


def train_and_save(case: Case, folder: str, steps: int) -> Result:
    """Make the first steps and save."""
    run = make(case)
    for step in range(steps):
        run.step(batch_of(case.rows[step], step))
    run.save(folder)
    return {}


def resume_and_train(case: Case, folder: str) -> Result:
    """Go on from a checkpoint to the last step."""
    run = make(case)
    run.load(folder)
    kept = watched(run)
    told = [run.step(batch_of(case.rows[step], step)) for step in range(run.steps, len(case.rows))]
    return result(told, kept[0], run.full_weights())


def result(told: list[Any], grads: dict[str, Tensor], weights: dict[str, Tensor]) -> Result:
    """Return what is compared, in a form that travels between processes."""
    return {
        "loss": [m.loss for m in told],
        "norm": [m.grad_norm for m in told],
        "count": [m.tokens for m in told],
        "grads": {name: grad.numpy().copy() for name, grad in grads.items()},
        "weights": {name: weight.detach().numpy().copy() for name, weight in weights.items()},
    }


def plain(case: Case) -> Result:
    """The same in plain torch, in one process: slice by slice, without anything of pdrun."""
    torch.manual_seed(0)
    model = Tiny(case.tied)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses, norms, counts = [], [], []
    for step, rows in enumerate(case.rows):
        words, targets = batch_of(rows, step)
        bounds = [rows * i // case.slices for i in range(case.slices + 1)]
        sums, count = [], 0
        for low, high in itertools.pairwise(bounds):
            if low == high:
                continue
            total, some = token_loss(model(words[low:high]), (words[low:high], targets[low:high]))
            total.backward()
            sums.append(float(total.detach()))
            count += int(some)
        used = {
            name: param.grad for name, param in model.named_parameters() if param.grad is not None
        }
        for grad in used.values():
            grad.div_(count)
        norm = sum(float(grad.double().square().sum()) for grad in used.values()) ** 0.5
        if case.clip is not None:
            for grad in used.values():
                grad.mul_(min(1.0, case.clip / (norm + 1e-6)))
        losses.append(sum(sums) / count)
        norms.append(norm)
        counts.append(count)
        grads = {name: grad.clone() for name, grad in used.items()}
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.named_parameters())
    return {
        "loss": losses,
        "norm": norms,
        "count": counts,
        "grads": {name: grad.numpy() for name, grad in grads.items()},
        "weights": {name: weight.detach().numpy() for name, weight in weights.items()},
    }
