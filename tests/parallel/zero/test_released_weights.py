"""Level 3: a weight that is read outside of its unit's forward is gathered, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.model.released import mark_gathered, mark_released
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import RankError, Worlds
from tests.lib.tiers import mark_all_but

pytestmark = pytest.mark.torch

WIDTH, WORDS = 8, 16


class Encoder(nn.Module):
    """A module whose other method computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        return (self.inner(x) @ self.matrix).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Reader(nn.Module):
    """Reads weights in the way that ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.calls = 0
        self.emb = nn.Embedding(WORDS, WIDTH)
        if kind == "method of a child":
            self.child = Encoder()
        if kind in ("method of a block", "block of another", "penalty", "late"):
            self.blocks = nn.ModuleList(Encoder() for _ in range(3))
        if kind == "lists in a list":
            self.blocks = nn.ModuleList(
                nn.ModuleList([nn.Linear(WIDTH, WIDTH), Encoder()]) for _ in range(2)
            )
        if kind == "list in a dict":
            self.parts = nn.ModuleDict({"h": nn.ModuleList(Encoder() for _ in range(2))})
        if kind == "parameter list":
            self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
            self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH)})
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, x: Tensor) -> Tensor:
        if self.kind == "method of a child":
            return self.child.encode(x)
        if self.kind == "parameter list":
            return x * self.scales[0] * self.scales[1] + self.shifts["a"]
        if self.kind == "lists in a list":
            for first, second in self.blocks:
                x = second(first(x)) + x
            return x
        if self.kind == "list in a dict":
            for block in self.parts["h"]:
                x = block(x)
            return x
        for block in getattr(self, "blocks", ()):
            x = block.encode(x) if self.kind == "method of a block" else block(x)
        if self.kind == "block of another" or (self.kind == "late" and self.calls > 2):
            x = F.linear(x, self.blocks[0].inner.weight, self.blocks[2].inner.bias)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.hidden(self.emb(tokens))
        return x @ self.emb.weight.T if self.kind == "tied by reading" else self.head(x)


KINDS = [
    "tied by reading",
    "method of a child",
    "method of a block",
    "block of another",
    "penalty",
    "late",
    "lists in a list",
    "list in a dict",
    "parameter list",
]


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (8, 4), generator=dice), torch.randint(
        WORDS, (8, 4), generator=dice
    )


def make(kind: str, **options: Any) -> Any:
    model = Reader(kind)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        total = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
        if kind == "penalty":
            total = total + batch[1].numel() * 0.1 * model.blocks[0].inner.weight.square().sum()
        return total, batch[1].numel()

    return parallelize(
        model, lambda p: torch.optim.AdamW(p, 1e-2), loss, norm=True, timeout=20, **options
    )


def train(kind: str, **options: Any) -> Any:
    run = make(kind, **options)
    steps = [run.step(tokens_of(step)) for step in range(4)]
    run.model.eval()
    with torch.no_grad():
        output = run.model(tokens_of(9)[0])
    run.model.train()
    weights = {name: weight.tolist() for name, weight in run.full_weights().items()}
    return [m.loss for m in steps], output.tolist(), weights, [m.grad_norm for m in steps]


@pytest.mark.parametrize("kind", mark_all_but(4, KINDS))
def test_reads_outside_of_units_train_as_below_level_3(kind: str, worlds: Worlds) -> None:
    for times, options in ((1, {}), (2, {"gather": "step"}), (2, {"recompute": "full"})):
        want = worlds(2).run(train, kind, optimizer_level=2, accumulate=times)[0]
        for told in worlds(2).run(train, kind, optimizer_level=3, accumulate=times, **options):
            assert told[:3] == want[:3], options
            assert told[3] == pytest.approx(want[3], rel=1e-12)


def test_units_are_modules_that_are_called() -> None:
    encoders = ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    nested = Reader("lists in a list")
    assert find_units(nested, None) == encoders
    assert find_units(nested, ["blocks.*.*"]) == encoders
    assert find_units(Reader("list in a dict"), None) == ["parts.h.0", "parts.h.1"]
    assert find_units(Reader("parameter list"), None) == ["emb", "head"]
    plain = Reader("tied by reading")
    plain.act = nn.Sequential(nn.ReLU(), nn.Dropout())  # members without weights are no units
    assert find_units(plain, None) == ["emb", "head"]
    with pytest.raises(UsageError, match=r"blocks, a ModuleList, which is never called"):
        find_units(nested, ["blocks"])


def named(**options: Any) -> list[list[str]]:
    run = make("lists in a list", **options)
    run.step(tokens_of(0))
    return [run.recomputed, run.compiled]


def test_recomputation_and_compilation_reach_nested_lists(worlds: Worlds) -> None:
    encoders = ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    assert worlds(1).run(named, recompute="full")[0] == [encoders, []]
    assert worlds(1).run(named, compile={"backend": "eager"})[0] == [[], encoders]


def read_between_steps() -> dict[str, str]:
    """Return the error of each way to read a weight between steps."""
    run = make("block of another", optimizer_level=3)
    run.step(tokens_of(0))
    model = run.model
    ways = {
        "state_dict": model.state_dict,
        "deepcopy": lambda: copy.deepcopy(model),
        "average": lambda: torch.optim.swa_utils.AveragedModel(model),
        "submodule": lambda: model.blocks[1](torch.ones(1, WIDTH)),
        "value": lambda: model.head.weight.sum(),
        "data": lambda: model.head.weight.data,
        "list": lambda: torch.stack([model.head.bias, model.head.bias]),
    }
    found = {}
    for name, read in ways.items():
        try:
            read()
            found[name] = "read"
        except UsageError as error:
            found[name] = str(error)
    assert model.head.weight.shape == (WORDS, WIDTH)
    assert model.head.weight.requires_grad
    assert repr(model.head.weight) == "Parameter(head.weight, shape=(16, 8), released)"
    return found


def test_a_read_between_steps_is_refused_by_name(worlds: Worlds) -> None:
    for name, error in worlds(2).run(read_between_steps)[0].items():
        assert "is read outside of a forward pass" in error, name
        assert "run.gathered_weights()" in error, name
        assert "test_released_weights.py:" in error or name in ("deepcopy", "average"), error


def test_what_needs_no_values_works_on_a_released_weight() -> None:
    def refuse(name: str) -> None:
        raise UsageError(f"{name} is read", where="here")

    weight = nn.Parameter(torch.ones(3))
    mark_released(weight, "w", refuse)
    torch.autograd.backward([weight], [torch.full((3,), 2.0)])  # as a pipeline does for weights
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]
    assert weight.view_as(weight).grad_fn is not None
    assert torch.zeros_like(weight).tolist() == [0, 0, 0]
    assert (weight.dtype, weight.numel(), len(weight)) == (torch.float32, 3, 3)
    with pytest.raises(UsageError, match="w is read"):
        weight.view_as(torch.ones(3))
    mark_gathered(weight)
    assert type(weight) is nn.Parameter
    assert float(weight.detach().sum()) == 3


def read_gathered() -> Any:
    run = make("block of another", optimizer_level=3)
    run.step(tokens_of(0))
    full = {name: weight.tolist() for name, weight in run.full_weights().items()}
    with run.gathered_weights():
        state = {name: weight.tolist() for name, weight in run.model.state_dict().items()}
        inner = run.model.blocks[1](torch.ones(1, WIDTH)).tolist()
        copied = copy.deepcopy(run.model)
    after = run.step(tokens_of(1)).loss
    expected = copied.blocks[1](torch.ones(1, WIDTH)).tolist()
    kept = []
    bias = run.model.head.bias
    for change in (
        lambda: bias.add_(1.0),
        lambda: bias.data.add_(1.0),
        lambda: setattr(bias, "data", bias.detach() + 1.0),
        lambda: run.model.load_state_dict(
            {name: value + 1.0 for name, value in run.model.state_dict().items()}
        ),
    ):
        want = run.full_weights()["head.bias"] + 1.0
        with run.gathered_weights(), torch.no_grad():
            change()
        kept.append(torch.equal(run.full_weights()["head.bias"], want))
    return state == full, inner == expected, after == after, kept


def test_gathered_weights_can_be_read_and_changed(worlds: Worlds) -> None:
    for same, inner, finite, kept in worlds(2).run(read_gathered):
        assert same
        assert inner
        assert finite
        assert kept == [True] * 4


def change_one_rank(level: int) -> None:
    run = make("penalty", optimizer_level=level)
    run.step(tokens_of(0))
    with run.gathered_weights(), torch.no_grad():
        if torch.distributed.get_rank() == 1:
            run.model.head.bias.add_(1.0)
    run.step(tokens_of(1))


@pytest.mark.parametrize("level", [0, 2, 3])
def test_a_change_on_one_rank_only_is_refused(level: int, worlds: Worlds) -> None:
    """Below level 3 the ranks had gone on with other weights each."""
    with pytest.raises(RankError, match=r"head.bias has other values on rank [01]"):
        worlds(2).run(change_one_rank, level)


def load_between_steps() -> None:
    run = make("penalty", optimizer_level=3)
    run.model.load_state_dict(Reader("penalty").state_dict())


def test_loading_released_weights_is_refused_by_name(worlds: Worlds) -> None:
    """torch had wrapped the error of each weight in one of its own, without the hint."""
    with pytest.raises(RankError, match=r"with run\.gathered_weights") as told:
        worlds(2).run(load_between_steps)
    assert told.value.kind == "UsageError"


def copy_and_call() -> tuple[bool, bool]:
    run = make("penalty", optimizer_level=3)
    run.step(tokens_of(0))
    with run.gathered_weights():
        copied = copy.deepcopy(run.model)
        file = io.BytesIO()
        torch.save(run.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    is_called = True
    if torch.distributed.get_rank() == 0:  # copies gather nothing
        is_called = torch.equal(copied(tokens_of(1)[0]), loaded(tokens_of(1)[0]))
    run.step(tokens_of(1))
    full = run.full_weights()
    return is_called, all(full[name].shape == one.shape for name, one in loaded.named_parameters())


def test_copies_and_files_of_a_model_are_plain_models(worlds: Worlds) -> None:
    assert worlds(2).run(copy_and_call) == [(True, True)] * 2


def call_on_one_rank(shard_group: int | None = None) -> None:
    run = make("block of another", optimizer_level=3, shard_group=shard_group)
    run.step(tokens_of(0))
    run.state.data_group.watchdog.seconds = 2.0
    if torch.distributed.get_rank() == 0:
        run.model(tokens_of(1)[0])
    run.step(tokens_of(1))


@pytest.mark.parametrize("shard_group", [None, 1])  # 1: every rank has a copy of all shards
def test_a_call_on_one_rank_only_is_refused(shard_group: int | None, worlds: Worlds) -> None:
    kind, text = worlds(2).failure(0, call_on_one_rank, shard_group)
    assert kind == "UsageError", text
    assert "the model is called outside of a step" in text
    assert "rank 1 did not do so in 2 s" in text
    assert "do it on every rank" in text
