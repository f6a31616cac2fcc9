"""
What the worlds run to hold pipelines against plain torch: models that are cut in every way, and one
step of each.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import solve_mesh
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.report import memory
from pdrun.parallel.report import traffic as volume
from pdrun.parallel.run import Run
from tests.lib.shared_exports import share_exports
from tests.lib.small_models import LENGTH, WIDTH, WORDS, Block, Tiny, batch_of, token_loss

Result = dict[str, Any]


class Skip(Tiny):
    """Every other batch leaves a layer out, and a stage's only one at that."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.scale
        for index, block in enumerate(self.blocks):
            if index != 1 or int(x.sum()) % 2:
                h = block(h)
        return self.head(self.norm(h))


class Masked(nn.Module):
    """
    Blocks that take and return more than one tensor: a residual of the input, positions, a dict.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor, *, extra: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            h = h + torch.tanh(self.mix(h) + extra["place"]) * extra["mask"] + 0.1 * extra["first"]
            return h, {**extra, "depth": extra["depth"] + 1}

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        extra = {
            "place": self.places,
            "mask": (x % 5 != 0).unsqueeze(-1).to(h.dtype),
            "first": h,
            "depth": 0,
        }
        for layer in self.layers:
            h, extra = layer(h, extra=extra)
        return self.head(h + self.places * extra["depth"])


class Loose(nn.Module):
    """A GPT as one writes it: a Sequential of blocks, and the embedding as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(0.0) for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.bytes(x))) @ self.bytes.weight.T


class Inplace(Tiny):
    """Changes in place what modules return, and what they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.9)
            return x + self.down(F.relu(self.up(x), inplace=True))

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers=layers)
        self.blocks = nn.ModuleList(self.Block() for _ in range(layers))
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h += self.places
        for block in self.blocks:
            h = block(h)
            h += 0.1
        return self.head(self.norm(h))


class Frozen(Tiny):
    """A block that isn't trained, and a part of another."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


class Crossed(Tiny):
    """Blocks of different stages share a weight, and so do blocks and what lies beside them."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].norm1.bias = self.norm.bias


class Typed(nn.Module):
    """Halves that read the type of their first weight, as models of transformers do."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(0.0) for _ in range(2))

        def forward(self, h: Tensor) -> Tensor:
            h = h * torch.full((1,), 0.5, dtype=next(self.parameters()).dtype)
            for block in self.blocks:
                h = block(h)
            return h

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.first, self.second = self.Half(), self.Half()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.emb(x))))


MODELS: dict[str, Any] = {
    "typed": Typed,
    "tiny": lambda: Tiny(layers=4),
    "tied": lambda: Tiny(tied=True, layers=4),
    "dropout": lambda: Tiny(p=0.2, layers=4),
    "skip": lambda: Skip(layers=4),
    "masked": Masked,
    "loose": Loose,
    "inplace": Inplace,
    "row": lambda: nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, 40),
        nn.GELU(),
        nn.Linear(40, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.0),
        nn.Linear(WIDTH, WORDS),
    ),
    "deep": lambda: Tiny(layers=8),
    "frozen": Frozen,
    "crossed": Crossed,
}


MEGATRON: dict[str, Any] = {
    "blocks.*.up.weight": L("tp", None),
    "blocks.*.down.weight": L(None, "tp"),
    "blocks.*.proj.weight": L(None, "tp"),
}
CUTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "megatron": MEGATRON,
    "words": MEGATRON | {"emb.weight": L("tp", None), "head.weight": L("tp", None)},
    "tied": MEGATRON | {"emb.weight": L("tp", None)},
    "sequence": (
        MEGATRON
        | {
            "blocks.*.norm[12].layer_norm": OpLayout((L("dp", "tp", None),)),
            "blocks.*.add": OpLayout((L("dp", "tp", None),)),
            "blocks.*.add_1": OpLayout((L("dp", "tp", None),)),
        }
    ),
    "grid": {
        "blocks.*.up.weight": L("x", "y"),
        "blocks.*.down.weight": L("y", "x"),
        "emb.weight": L("y", "x"),
        "blocks.*.proj.weight": L(("x", "y"), None),
        "head.weight": L(("y", "x"), None),
    },
    "masked": {"layers.*.mix.weight": L("tp", None)},
    "wide": {"layers.*.mix": ((1, 1, 4), (1, 4)), "head.weight": L("tp", None)},
    "row": {"1.weight": L("tp", None), "3.weight": L(None, "tp"), "7.weight": L("tp", None)},
    "loose": MEGATRON | {"bytes.weight": L("tp", None)},
    "inplace": {"blocks.*.up.weight": L("tp", None), "blocks.*.down.weight": L(None, "tp")},
}
"""Layouts of operators, by name."""


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    model: str = "tiny"
    pp: int = 2
    dp: int = 1
    microbatches: int = 4
    rows: tuple[int, ...] = (16, 16)
    double: bool = False
    more: tuple[tuple[str, Any], ...] = ()
    """Of the Pipeline."""
    run: tuple[tuple[str, Any], ...] = ()
    """Of parallelize."""
    tp: int = 1
    cut: str = ""
    """Of `CUTS`; none: no strategy of operators."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = share_exports(MODELS[self.model](), self.model)
        return made.double() if self.double else made

    def __str__(self) -> str:
        more = "-".join(f"{key}={value}" for key, value in (*self.more, *self.run))
        cut = f"tp{self.tp}-{self.cut}-" if self.cut else ""
        sizes = f"pp{self.pp}-dp{self.dp}-{cut}m{self.microbatches}"
        return f"{self.model}-{sizes}-{more}-{self.rows}".replace(" ", "")


def make(case: Case) -> Run:
    """Return a case's run."""
    how = dict(case.run)
    if case.cut:
        rows = max(1, case.rows[0] // case.microbatches // case.dp)
        how |= {"strategy": Operators(CUTS[case.cut]), "sample": batch_of(rows, 0)}
    tensor = {"x": 2, "y": case.tp // 2} if case.cut == "grid" else {"tp": case.tp}
    return parallelize(
        case.build(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        token_loss,
        mesh=solve_mesh(case.world, {"pp": case.pp, "dp": case.dp, **tensor}),
        pipeline=Pipeline(case.microbatches, **dict(case.more)),
        norm=True,
        seed=5,
        **how,
    )


def train(case: Case) -> Result:
    """Make the steps; return losses, norms, the last step's gradients, and the weights."""
    run = make(case)
    kept: list[dict[str, Tensor]] = []
    run.watchers.append(
        lambda run: kept.append({name: grad.clone() for name, grad in run.gradients().items()})
    )
    told = [run.step(batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    return {
        "loss": [m.loss for m in told],
        "norm": [m.grad_norm for m in told],
        "grads": {name: grad.numpy() for name, grad in kept[-1].items()},
        "weights": {
            name: weight.detach().numpy().copy() for name, weight in run.full_weights().items()
        },
        "held": sorted(name for name, _ in run.model.named_parameters()),
    }


def alone(case: Case) -> Result:
    """
    The same in one process, slice by slice, with a run of one rank where dropout has to be placed.
    """
    if case.model == "dropout":
        run = parallelize(
            case.build(),
            lambda params: torch.optim.SGD(params, lr=0.1),
            token_loss,
            norm=True,
            seed=5,
            accumulate=case.microbatches * case.dp,
        )
        kept: list[dict[str, Tensor]] = []
        run.watchers.append(
            lambda run: kept.append({name: grad.clone() for name, grad in run.gradients().items()})
        )
        told = [run.step(batch_of(rows, step)) for step, rows in enumerate(case.rows)]
        return {
            "loss": [m.loss for m in told],
            "norm": [m.grad_norm for m in told],
            "grads": {name: grad.numpy() for name, grad in kept[-1].items()},
        }
    model = case.build()
    losses, norms = [], []
    slices = case.microbatches * case.dp
    for step, rows in enumerate(case.rows):
        words, targets = batch_of(rows, step)
        count, total = 0, 0.0
        for low, high in itertools.pairwise(rows * i // slices for i in range(slices + 1)):
            if low < high:
                part, some = token_loss(
                    model(words[low:high]), (words[low:high], targets[low:high])
                )
                part.backward()
                total, count = total + float(part.detach()), count + int(some)
        used = {
            name: param.grad for name, param in model.named_parameters() if param.grad is not None
        }
        for grad in used.values():
            grad.div_(count)
        losses.append(total / count)
        norms.append(sum(float(grad.double().square().sum()) for grad in used.values()) ** 0.5)
        grads = {name: grad.clone().numpy() for name, grad in used.items()}
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
                    param.grad = None
    return {"loss": losses, "norm": norms, "grads": grads}


class Borrow(Tiny):
    """The last block takes the embedding, which nobody passes on."""

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.emb(x)
        for index, block in enumerate(self.blocks):
            h = block(h + first if index == 3 else h)
        return self.head(self.norm(h))


class Opaque(Borrow):
    """The same with a block that cannot run on fake tensors."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)
        self.blocks[0].register_forward_hook(lambda module, args, out: out + float(out.sum()) * 0)


class Aliased(nn.Module):
    """Its output layer is a weight that no source names."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block(0.0) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        table = self.bytes
        return self.norm(self.blocks(table(x))) @ table.weight.T


@dataclass
class RungOutput:
    """What a rung of a ladder returns."""

    hidden: Tensor
    side: dict[str, Tensor]
    depth: int = 1


class Inside(Tiny):
    """The end calls a part of the first block, as diffusers' DiT does."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h) + self.blocks[0].norm1(h))


class Ladder(nn.Module):
    """
    Results skip stages, in a dataclass; modules are defined in another order than they are called,
    and the output layer is the embedding's weight.
    """

    class Rung(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, h: Tensor) -> RungOutput:
            up = torch.tanh(self.up(h))
            return RungOutput(h + up, {"up": up * 0.5})

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rungs = nn.ModuleList(self.Rung() for _ in range(4))
        self.emb = nn.Embedding(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.emb(x)
        kept: list[Tensor] = []
        for index, rung in enumerate(self.rungs):
            if index > 1:
                h = h + kept.pop()
            out = rung(h)
            h = out.hidden
            kept.append(out.side["up"])
        return self.norm(h + first) @ self.emb.weight.T


class Direct(Tiny):
    """Calls the forwards of its blocks, as SqueezeBERT does; one of them with a skip."""

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.emb(x)
        for block in self.blocks:
            h = block.forward(h)
        return self.head(self.norm(h + first))


class Indexed(nn.Module):
    """Takes the members of several lists by their index, and decides by its batch, as XLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        assert int(x.max()) < WORDS
        h = self.emb(x)
        mask = (x % 5 != 0).unsqueeze(-1).to(h.dtype)
        for index in range(4):
            h = h + torch.tanh(self.mixes[index](h))
            h = self.norms[index](h)
            h *= mask
        return self.head(h)


class Rewrites(Tiny):
    """Changes the embedding's result in place while later stages run, and uses it at the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.emb(x)
        h = first * 1.0
        for block in self.blocks:
            h = block(h)
            first += 0.1 * h
        return self.head(self.norm(h + first))


class Writes(Tiny):
    """Writes results into a tensor of its own, and decides by its batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert int(x.max()) < WORDS
        h = self.emb(x)
        kept = torch.zeros(*x.shape, WIDTH, dtype=h.dtype)
        kept[:, 1:] = h[:, 1:]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h + kept))


class WritesUnseen(Writes):
    """The same with a block that cannot run on fake tensors."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)
        self.blocks[0].register_forward_hook(lambda module, args, out: out + float(out.sum()) * 0)


class Quantised(Borrow):
    """As Borrow, and blocks are scaled by frozen bytes, which have an attribute."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(0.0)
            codes = torch.randint(256, (WIDTH,), dtype=torch.uint8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            setattr(self.codes, "unit", 1 / 128)  # noqa: B010

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) * (self.codes * self.codes.unit)

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers=layers)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(layers))


class Peek(Tiny):
    """A branch on an activation, between modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h) if float(h.detach().mean()) < 1e9 else h
        return self.head(self.norm(h))


class Select(Tiny):
    """Rows picked by an activation, between modules."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h[h.detach().mean((1, 2)) < 1e9])
        return self.head(self.norm(h))


class Backwards(Tiny):
    """Calls its blocks in another order than they are listed in."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        h = self.blocks[0](h)
        return self.head(self.norm(h))


class Odd(Tiny):
    """A block returns something that has no text."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.up(x), {x.shape}

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers=layers)
        self.blocks = nn.ModuleList(self.Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h, _ = block(h)
        return self.head(self.norm(h))


class Early(Tiny):
    """Leaves after half of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks[:2]:
            h = block(h)
        return h


MODELS |= {"ladder": Ladder, "aliased": Aliased, "inside": Inside, "indexed": Indexed}
OTHERS = (Borrow, Opaque, Peek, Select, Backwards, Odd, Early, Direct, Rewrites, Writes, Quantised)
for kind in (*OTHERS, WritesUnseen):
    MODELS[kind.__name__.lower()] = functools.partial(kind, layers=4)


def alone_on_pdrun(case: Case) -> Result:
    """Return losses, norms and the weights after the same steps of a run of one rank."""
    run = parallelize(
        case.build(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        token_loss,
        norm=True,
        seed=5,
        accumulate=case.microbatches * case.dp,
        clip=dict(case.run).get("clip"),
        precision=dict(case.run).get("precision"),
    )
    told = [run.step(batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    weights = {name: weight.detach().numpy().copy() for name, weight in run.full_weights().items()}
    return {"loss": [m.loss for m in told], "norm": [m.grad_norm for m in told], "weights": weights}


def evaluate(case: Case) -> Any:
    """Return all outputs, where they are, after a step and with dropout turned off."""
    run = make(case)
    run.step(batch_of(16, 0))
    run.evaluate(batch_of(16, 0))
    run.model.eval()
    found = [output for output in run.evaluate(batch_of(case.rows[0], 1)) if output is not None]
    assert run.step(batch_of(16, 2)).loss > 0, "and training goes on"
    return torch.cat(found).numpy() if found else None


def evaluate_alone(case: Case) -> Any:
    """Return the same of a run of one rank."""
    run = parallelize(
        case.build(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        token_loss,
        seed=5,
        accumulate=case.microbatches,
    )
    run.step(batch_of(16, 0))
    run.model.eval()
    with torch.no_grad():
        return run.model(batch_of(case.rows[0], 1)[0]).numpy()


def count_sends(case: Case) -> tuple[int, int]:
    """Return how many messages a rank sends in its second step, and their bytes."""
    run = make(case)
    run.step(batch_of(16, 0))
    axes = run.state.driver.exchange.links.axes
    axes.reset_counts()
    run.step(batch_of(16, 1))
    count = axes.counts["send", ("pp",)]
    return count.calls, count.nbytes


KINDS = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "join")
Sent = dict[str, tuple[int, int]]


def sent(run: Run, batches: list[Any]) -> tuple[Sent, Sent]:
    """
    Return calls and bytes over the data axes, counted in the last of some steps, and as predicted.
    """
    comms = {
        id(part.comm): part.comm
        for part in [*run.state.engine.sharded_buckets, *run.state.engine.gradient_buckets]
    }.values()
    for batch in batches:
        for comm in comms:
            comm.calls.clear()
            comm.nbytes.clear()
        run.step(batch)
    counted = {
        kind: (
            sum(comm.calls.get(kind, 0) for comm in comms),
            sum(comm.nbytes.get(kind, 0) for comm in comms),
        )
        for kind in KINDS
    }
    predicted = {
        kind: (one.calls, one.nbytes) for kind, one in volume.count_traffic(run.state).items()
    }
    return {kind: count for kind, count in counted.items() if count[0]}, predicted


def sent_by(case: Case) -> tuple[Sent, Sent]:
    """Return what a case sends over the data axes in its second step."""
    return sent(make(case), [batch_of(rows, step) for step, rows in enumerate(case.rows)])


def gathered(case: Case) -> tuple[int, int, int]:
    """
    Return the most bytes of gathered weights at once in a step, as predicted, and how many stay
    after it.
    """
    run = make(case)
    run.step(batch_of(case.rows[0], 0))
    most = 0

    def now() -> int:
        return sum(cut.full.untyped_storage().nbytes() for cut in run.state.engine.sharded_buckets)

    def watched(start: Any) -> Any:
        def started() -> None:
            nonlocal most
            start()
            most = max(most, now())

        return started

    for cut in run.state.engine.sharded_buckets:
        cut.start_gather = watched(cut.start_gather)  # type: ignore[method-assign]
    run.step(batch_of(case.rows[-1], 1))
    return most, memory._gathered_bytes(run.state), now()


def outputs(case: Case) -> list[Any]:
    """
    Return a rank's outputs on micro-batches before and after a step, and the loss of a step after
    that.
    """
    run = make(case)
    found = run.evaluate(batch_of(case.rows[0], 1))
    run.step(batch_of(16, 0))
    run.model.eval()
    found += run.evaluate(batch_of(case.rows[0], 1))
    run.model.train()
    return [None if output is None else output.numpy() for output in found] + [
        run.step(batch_of(16, 2)).loss
    ]


def refused(case: Case) -> str:
    """Return what is said to a case that can't be."""
    try:
        make(case)
    except UsageError as error:
        return str(error)
    return ""


def held_after(case: Case) -> dict[str, Any]:
    """Return what a rank holds after the steps."""
    run = make(case)
    for step, rows in enumerate(case.rows):
        run.step(batch_of(rows, step))
    return {name: param.detach().numpy().copy() for name, param in run.model.named_parameters()}


def stay_away(case: Case) -> None:
    """Have the first rank make a step and the others none: they stay until it has given up."""
    run = make(case)
    store = torch.distributed.distributed_c10d._get_default_store()
    if torch.distributed.get_rank():
        store.wait(["given up"])
        return
    try:
        run.step(batch_of(16, 0))
    finally:
        store.set("given up", "")


def explained(case: Case) -> str:
    """Return what a run's pipeline says of itself."""
    return make(case).explain()


def verified(case: Case) -> str:
    """Prove a run against one process by its own means."""
    run = make(case)
    run.step(batch_of(16, 0))
    return str(
        run.verify(
            [batch_of(rows, step) for step, rows in enumerate(case.rows)], steps=len(case.rows)
        )
    )


def train_and_save(case: Case, folder: str) -> None:
    """Make one step and save."""
    run = make(case)
    run.step(batch_of(16, 0))
    run.save(folder)


def go_on(case: Case, folder: str) -> list[float]:
    """Take up a checkpoint and make two steps more; return their losses."""
    run = make(case)
    assert run.resume(folder)
    return [run.step(batch_of(16, step)).loss for step in (1, 2)]
