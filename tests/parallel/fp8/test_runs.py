"""Runs with linear modules in fp8: on every mesh the numbers of one process, and near bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdrun
from pdrun.parallel.fp8.options import Fp8
from pdrun.parallel.parallelize import parallelize
from tests.lib import tiers
from tests.lib.rank_pool import RankError, Worlds
from tests.parallel.fp8.kinds import SCALES

pytestmark = pytest.mark.torch
WORDS, WIDTH, LENGTH = 64, 32, 16
STRATEGY = {
    "blocks.*.up": pdrun.col("tp"),
    "blocks.*.down": pdrun.row("tp"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.odd = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        return x + self.down(inner) * torch.sigmoid(self.odd(x).sum(-1, keepdim=True))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = F.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
    return x, (3 * x + 1) % WORDS


def make(precision: Any = None, axes: dict[str, int] | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    if axes and axes.get("tp", 1) > 1:
        options["strategy"] = pdrun.Strategy(STRATEGY)
    if axes and axes.get("pp", 1) > 1:
        stages = {"emb": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}
        options["pipeline"] = pdrun.Pipeline(2, schedule="1f1b", stages=stages)
    return parallelize(
        Model(),
        lambda params: torch.optim.AdamW(params, 1e-2),
        loss,
        precision=precision or Fp8(least=0),
        mesh=pdrun.mesh(**(axes or {"dp": -1})),
        norm=True,
        **options,
    )


def train(axes: dict[str, int], options: dict[str, Any], precision: Any = None) -> Any:
    """Prove a run, and return its losses and norms."""
    run = make(precision, axes, **options)
    run.verify([batch_of(0)])
    found = [run.step(batch_of(step)) for step in range(3)]
    losses = [(float(one.loss), float(one.grad_norm)) for one in found]
    return losses, run.explain(batch_of(0))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_level": 3, "recompute": "full"},
        {"optimizer_level": 2, "accumulate": 2, "recompute": "selective"},
        tiers.thorough({"optimizer_level": 1, "copies": 2}),
        tiers.thorough({"optimizer_level": 3, "accumulate": 2, "gather": "step"}),
        tiers.thorough({"optimizer_level": 3, "offload": "all"}),
    ],
    ids=str,
)
def test_data_axes_have_the_bits_of_level_0(options: dict[str, Any], worlds: Worlds) -> None:
    shape = {key: value for key, value in options.items() if key in ("accumulate", "copies")}
    (found, _), *_ = worlds(2).run(train, {"dp": 2}, options)
    (expected, _), *_ = worlds(2).run(train, {"dp": 2}, shape)
    assert [one for one, _ in found] == [one for one, _ in expected]
    norms = [[norm for _, norm in losses] for losses in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)  # its sum is in another order


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_model_axes_have_the_numbers_of_one_process(
    axes: dict[str, int], scales: str, worlds: Worlds
) -> None:
    several = worlds(2).run(train, axes, {}, Fp8(scales, least=0))
    alone, text = train({"dp": 1}, {} if "tp" in axes else {"accumulate": 2}, Fp8(scales, least=0))
    for found, _ in several:
        assert found == [pytest.approx(numbers, rel=2e-2) for numbers in alone]
    # a stage has stand-ins of the others' modules
    listed = f"in fp8, a scale per {scales}: blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down"
    assert all(listed in each for each in (text, *(text for _, text in several)))


def test_a_shard_that_is_too_small_stays_in_bf16(worlds: Worlds) -> None:
    """A rank's part has half of the weight's elements; one process multiplies as the ranks do."""
    text = worlds(2).run(train, {"tp": 2}, {}, Fp8(least=4096))[0][1]
    assert "products in bf16, fewer than least=4,096 elements: blocks.0.up" in text


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        (
            {"pp": 2},
            {"pipeline": pdrun.Pipeline(2, schedule="zero-bubble")},
            "not supported with a schedule that defers gradients of weights",
        ),
        (
            {"tp": 2},
            {"strategy": pdrun.Operators({})},
            "not supported with strategy=pdrun.Operators",
        ),
    ],
)
def test_what_multiplies_otherwise_is_refused(
    axes: dict[str, int], options: Any, text: str, worlds: Worlds
) -> None:
    with pytest.raises(RankError, match=text):
        worlds(2).run(refuse, axes, options)


def refuse(axes: dict[str, int], options: Any) -> None:
    parallelize(
        Model(),
        lambda params: torch.optim.SGD(params, 0.1),
        loss,
        sample=batch_of(0),
        mesh=pdrun.mesh(**axes),
        precision=Fp8(least=0),
        **options,
    )


@pytest.mark.parametrize("scales", SCALES)
def test_losses_are_near_those_of_bf16(scales: str) -> None:
    losses = []
    for precision in ("bf16", Fp8(scales, least=0)):
        run = make(precision)
        losses.append([float(run.step(batch_of(step)).loss) for step in range(40)])
    assert losses[1][-1] < 0.2 * losses[1][0]
    for mine, want in zip(*losses, strict=True):
        assert mine == pytest.approx(want, rel=0.1, abs=0.01)
    assert losses[0] != losses[1]


def test_a_compiled_run_has_the_losses_of_an_eager_one() -> None:
    losses = []
    for compiled in (False, {"backend": "aot_eager"}):
        run = make(accumulate=2, compile=compiled, recompute="full")
        losses.append([float(run.step(batch_of(step)).loss) for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_autocast_keeps_weights_wide() -> None:
    run = make(pdrun.Precision("bf16", autocast=True, fp8=Fp8(least=0)))
    assert {weight.param.dtype for weight in run.state.engine.weights} == {torch.float32}
    first, *_, last = (float(run.step(batch_of(step)).loss) for step in range(20))
    assert last < 0.7 * first


def test_checkpoints_are_those_of_bf16(tmp_path: Path) -> None:
    """Weights and optimizer state keep their types: a run in another precision goes on."""
    run = make()
    for step in range(3):
        run.step(batch_of(step))
    run.save(tmp_path / "checkpoints")
    weights = run.full_weights()
    for precision in ("bf16", Fp8(least=0)):
        other = make(precision)
        other.load(tmp_path / "checkpoints")
        for name, value in other.full_weights().items():
            assert value.dtype == torch.float32 and torch.equal(value, weights[name]), name
        next_loss = float(other.step(batch_of(3)).loss)
    assert next_loss == float(run.step(batch_of(3)).loss)


def test_memory_counts_what_fp8_keeps() -> None:
    """An input in fp8 has a byte, not two: here 2 * 8 * 16 * (32 + 128) of each block."""
    estimates = {}
    for name, precision in (("bf16", "bf16"), ("fp8", Fp8(least=0))):
        estimates[name] = make(precision).memory(batch_of(0))
    assert estimates["fp8"].weights == estimates["bf16"].weights
    saved = estimates["bf16"].activations - estimates["fp8"].activations
    assert saved > 8 * LENGTH * 4 * WIDTH
