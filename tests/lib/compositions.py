"""
One model under every combination of what `parallelize` can do: cases, drawn by a seed, and what the
ranks run of them.
"""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.interfaces import Cutter
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.tensor import Strategy, col, cross_entropy, heads, replicate, row, seq, vocab
from pdrun.parallel.tensor.linear_2d_3d import linear2d
from tests.lib.decoder_model import WIDTH, Block, strategy
from tests.lib.shared_exports import share_exports

WORDS, LENGTH, HIDDEN = 37, 8, 50


class Model(nn.Module):
    """
    A decoder with a table of positions, grouped queries, a weight that nobody uses, a buffer, ties
    and dropout.
    """

    def __init__(self, tied: bool, p: float, layers: int) -> None:
        super().__init__()
        self.emb, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)
        self.layers = nn.ModuleList(Block(8, 4, HIDDEN, True, p) for _ in range(layers))
        self.never = nn.Linear(7, 1)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        """``[rows, positions]`` to logits."""
        h = self.emb(ids) * self.scale + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


@dataclass(frozen=True)
class Task:
    """What is trained: whatever the ranks do, it has one answer."""

    tied: bool = False
    p: float = 0.0
    rows: tuple[int, ...] = (12, 12, 12, 12)
    clip: float | None = None
    optimizer: str = "SGD"
    precision: Any = None
    empty: bool = False
    layers: int = 2


@dataclass(frozen=True)
class Place:
    """How the ranks do it."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    kind: str = "styles"
    schedule: str = "1f1b"
    ulysses: int = 1
    level: int = 0
    accumulate: int = 1
    copies: int = 1
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def slices(self) -> int:
        """How many pieces a batch is cut into."""
        return self.dp * self.accumulate * self.copies

    def mesh(self) -> mesh.Mesh:
        """Return the devices; linears over two axes have two."""
        tensor = {"x": 2, "y": self.tp // 2} if self.kind == "2d" else {"tp": self.tp}
        return mesh.make_mesh(pp=self.pp, dp=self.dp, cp=self.cp, **tensor)

    def __str__(self) -> str:
        return "-".join(
            f"{key}={value}" for key, value in vars(self).items() if value != getattr(Place, key)
        )


OPERATORS = ("operators", "gathered", "words", "parts", "heads")
"""
Kinds of strategies of operators: Megatron's, with a head cut by words that are gathered or not, and
sequences, with attention by heads too.
"""


def cutter(kind: str) -> Cutter:
    """Return a strategy of a kind."""
    if kind in OPERATORS:
        column, rows = L("tp", None), L(None, "tp")
        if kind in ("parts", "heads"):
            attention = (
                {"layers.*.scaled_dot_product_attention": (L("dp", "tp", None, None),)}
                if kind == "heads"
                else {}
            )
            return Operators({"emb": (None, L("dp", "tp")), **attention})
        head: dict[str, Any] = {} if kind == "operators" else {"head": (None, column)}
        return Operators(
            {
                "*.w[qkv].weight": column,
                "*.gate.weight": column,
                "*.up.weight": column,
                "emb.weight": column,
                "*.wo.weight": rows,
                "*.down.weight": rows,
                **head,
            },
            gather=kind != "words",
        )
    if kind == "2d":
        across = ("y", "x")
        return Strategy(
            {
                "layers.*.attn.w[qkv]": col(across),
                "layers.*.attn.wo": row(across),
                "layers.*.attn": heads(across),
                "layers.*.mlp.gate|layers.*.mlp.up": linear2d("x", "y", cut=True),
                "*.down": linear2d("y", "x", gather=True),
                "*.thin": seq(across, dim=-1, total=HIDDEN),
                "emb|head": vocab("x"),
            }
        )
    parts = kind == "sequence"
    cut = strategy("tp", parts, gather=False)
    return (
        Strategy({**cut.rules, "places": seq("tp", dim=0, cut=True), "never": replicate()})
        if parts
        else cut
    )


OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
}


def batch_of(rows: int, step: int) -> tuple[Tensor, Tensor]:
    """Return sequences and targets, the same for equal arguments; some targets are padding."""
    dice = torch.Generator().manual_seed(100 * rows + step)
    words = torch.randint(WORDS, (rows, LENGTH + 1), generator=dice)
    return words[:, :-1], words[:, 1:].masked_fill(
        torch.rand(rows, LENGTH, generator=dice) < 0.2, -100
    )


def token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of logits that may be cut, as (sum, count)."""
    return cross_entropy(logits, batch[1], reduction="sum"), (batch[1] != -100).sum()


def make(task: Task, place: Place, **more: Any) -> Run:
    """Return the run of a task."""
    torch.manual_seed(0)
    with pdrun.empty_init() if task.empty else nullcontext():
        model = share_exports(Model(task.tied, task.p, task.layers), task.p)
    options: dict[str, Any] = {"accumulate": place.accumulate}
    if place.pp > 1:
        options = {"pipeline": pdrun.Pipeline(place.accumulate, place.schedule)}
    if place.tp > 1 or place.kind in OPERATORS:
        options["strategy"], options["sample"] = cutter(place.kind), batch_of(12 // place.slices, 0)
    if place.cp > 1:
        options["context"] = pdrun.ContextParallel(place.ulysses, tables={"places.weight": 0})
    options |= {"optimizer": OPTIMIZERS[task.optimizer], "loss": token_loss, "mesh": place.mesh()}
    return parallelize(
        model,
        optimizer_level=place.level,
        copies=place.copies,
        clip=task.clip,
        norm=True,
        precision=task.precision,
        seed=5,
        **{**options, **dict(place.more), **more},
    )


Told = list[tuple[float, float]]


def first(task: Task, place: Place, folder: str | None) -> Told:
    """
    Prove the run against one process, make the first two steps and save; return losses and norms.
    """
    run = make(task, place)
    if folder is not None:
        run.verify([batch_of(rows, 9) for rows in sorted(set(task.rows))])
    told = [run.step(batch_of(rows, step)) for step, rows in enumerate(task.rows[:2])]
    if folder is not None:
        run.save(folder)
    return [(one.loss, float(one.grad_norm or 0)) for one in told]


def second(task: Task, place: Place, folder: str) -> Told:
    """Take up what others saved, and make the other steps."""
    run = make(task, place)
    run.load(folder)
    told = [run.step(batch_of(task.rows[step], step)) for step in range(run.steps, len(task.rows))]
    return [(one.loss, float(one.grad_norm or 0)) for one in told]


def alone(task: Task, slices: int) -> Told:
    """Make all steps in one process, slice by slice."""
    run = make(replace(task), Place(accumulate=slices))
    told = [run.step(batch_of(rows, step)) for step, rows in enumerate(task.rows)]
    return [(one.loss, float(one.grad_norm or 0)) for one in told]


def laid_out(task: Task, place: Place) -> str:
    """Prove a run, and return how its operators are laid out."""
    run = make(task, place)
    run.verify([batch_of(rows, 9) for rows in sorted(set(task.rows))])
    told: str = run.model.explain()
    return told


def collectives(task: Task, place: Place) -> dict[str, int]:
    """Prove a run; return how many collectives of each kind over tp a step has."""
    run = make(task, place)
    run.verify([batch_of(12, 9)])
    run.axes.reset_counts()
    run.step(batch_of(12, 0))
    return {
        kind: count.calls for (kind, names), count in run.axes.counts.items() if names == ("tp",)
    }


def words_over_two_axes() -> tuple[int, int]:
    """Prove a run whose logits stay cut over two axes; return which words are here."""
    run = parallelize(
        Model(False, 0.0, 2),
        OPTIMIZERS["SGD"],
        token_loss,
        mesh=mesh.make_mesh(x=2, y=2),
        sample=batch_of(12, 0),
        strategy=Operators({"head.weight": L(("y", "x"), None)}, gather=False),
    )
    run.verify([batch_of(12, 9), batch_of(5, 9)])
    (logits,) = run.evaluate(batch_of(12, 0))
    return logits._pdrun_vocab_shard.low, logits._pdrun_vocab_shard.high


def mean_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy as a mean over rows."""
    return cross_entropy(logits, batch[1])


def refusal(place: Place, **more: Any) -> str:
    """Return what is said to a run that can't be, or to its first step; nothing where it trains."""
    try:
        make(Task(), place, **more).step(batch_of(12, 0))
    except UsageError as error:
        return str(error)
    return ""


# ---- drawing ----------------------------------------------------------------


def draw_task(dice: random.Random) -> Task:
    """Return something to train."""
    return Task(
        tied=dice.random() < 0.5,
        p=dice.choice((0.0, 0.0, 0.2)),
        rows=(12, dice.choice((12, 7, 5)), 12, 12),
        clip=dice.choice((None, 0.3)),
        optimizer=dice.choice(("SGD", "SGD", "AdamW")),
        precision=dice.choice((None,) * 5 + ("bf16",)),
        empty=dice.random() < 0.2,
        layers=dice.choice((2, 2, 4)),
    )


def draw_mesh(dice: random.Random, most: int) -> Place:
    """Return degrees of 2 to 8 ranks."""
    while True:
        pp, dp, cp, tp = (
            dice.choice(some) for some in ((1, 1, 2, 4), (1, 2, 3), (1, 1, 2), (1, 2, 4))
        )
        found = Place(pp, dp, cp, tp)
        if 2 <= found.world <= most:
            return found


def draw(dice: random.Random, task: Task, most: int = 8) -> Place:
    """Return a way to train a task that `parallelize` takes."""
    place = draw_mesh(dice, most)
    while place.pp > task.layers:
        place = draw_mesh(dice, most)
    kinds = ["styles"]
    if place.tp > 1:
        kinds += ["sequence"] if LENGTH // place.cp >= place.tp else []
        if (
            place.pp == place.cp == 1 and task.layers == 2 and place.world <= 4
        ):  # an export takes long
            kinds.append("operators")
        kinds.append("2d")
    staged = place.pp > 1
    schedules = ["gpipe", "1f1b", "zero-bubble"] + ["interleaved", "zero-bubble-v"] * (
        2 * place.pp <= task.layers
    )
    copies = 1 if staged else dice.choice((1, 1, 2))
    level = dice.choice((0, 1, 2, 3, 3) if staged or copies > 1 else (0, 1, 2, 3))
    more: dict[str, Any] = {}
    if level == 3 and dice.random() < 0.6:
        more["gather"] = dice.choice(("step", "pass") if copies == 1 else ("step",))
    if dice.random() < 0.4:
        more["recompute"] = dice.choice(("full", "selective"))
    if dice.random() < 0.2:
        more["offload"] = dice.choice(("optimizer", "activations", "all"))
    if dice.random() < 0.15:
        more["compress"] = "bf16"
    if dice.random() < 0.2:
        more["exact"] = False
    if level and dice.random() < 0.3:
        more["threshold"] = 2000
    if level and place.dp * place.cp == 4 and dice.random() < 0.3:
        more["shard_group"] = 2
    if dice.random() < 0.2:
        more["comm_fusion"] = dice.choice((False, 0.01))
    return replace(
        place,
        kind=dice.choice(kinds),
        schedule=dice.choice(schedules) if staged else "1f1b",
        ulysses=dice.choice((1, -1)) if place.cp > 1 else 1,
        level=level,
        copies=copies,
        accumulate=dice.choice((place.pp, place.pp + 2)) if staged else dice.choice((1, 2)),
        more=tuple(more.items()),
    )


Case = tuple[Task, Place, Place]


def cases(seed: int, count: int, most: int = 8) -> list[Case]:
    """Return tasks with the ways to begin and to end each."""
    found = []
    for turn in range(count):
        dice = random.Random(seed * 100_003 + turn)
        task = draw_task(dice)
        found.append((task, draw(dice, task, most), draw(dice, task, most)))
    return found
