"""
Runs on cut sequences: `parallelize(..., context=)` with data parallel, levels, dropout,
recomputation; proofs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.comm.mesh import make_mesh, solve_mesh
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.zero.precision import Precision
from tests.lib import small_models as zoo
from tests.lib.manual_sharding import Megatron
from tests.parallel.context_parallel.test_sharded_sequences import TABLES, VOCABULARY, Lm

pytestmark = pytest.mark.torch


class Dropping(Lm):
    """Dropout of embeddings, and of attention's weights."""

    def __init__(self, p: float, key_heads: int = 4) -> None:
        super().__init__(key_heads)
        self.drop = nn.Dropout(p)
        for block in self.blocks:
            block.p = p

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """``[batch, positions]`` to logits."""
        here = torch.arange(tokens.shape[1])
        x = self.drop(self.wte(tokens) + self.wpe(here))
        x = x * self.gain[: tokens.shape[1], None].to(x.dtype)
        for block in self.blocks:
            x = self.drop(block(x, None).flatten(0, 1)).view(x.shape)
        return self.head(x)  # type: ignore[no-any-return]


def batch_of(rows: int, length: int, step: int) -> dict[str, torch.Tensor]:
    """Return sequences and their targets, some of which are padding."""
    source = torch.Generator().manual_seed(100 * length + step)
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=source)
    targets = tokens[:, 1:].masked_fill(torch.rand(rows, length, generator=source) < 0.2, -100)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the targets here, as (sum, count)."""
    targets = batch["targets"].flatten()
    return f.cross_entropy(output.flatten(0, 1), targets, ignore_index=-100, reduction="sum"), (
        targets != -100
    ).sum()


def make(degrees: dict[str, int], settings: dict[str, Any] | None, p: float, **more: Any) -> Run:
    """Return a run of the model with the weights of seed 0."""
    torch.manual_seed(0)
    world = torch.distributed.get_world_size()
    context = None if settings is None else ContextParallel(tables=TABLES, **settings)
    return parallelize(
        Dropping(p),
        lambda params: torch.optim.SGD(params, 0.3, momentum=0.9),
        loss,
        mesh=solve_mesh(world, degrees),
        context=context,
        norm=True,
        seed=3,
        **more,
    )


def train(
    degrees: dict[str, int], settings: dict[str, Any] | None, p: float, lengths: Any, **more: Any
) -> Any:
    """Train some steps; return losses, norms and weights."""
    run = make(degrees, settings, p, **more)
    told = [run.step(batch_of(6, length, step)) for step, length in enumerate(lengths)]
    weights = {name: weight.double().numpy() for name, weight in run.full_weights().items()}
    return [m.loss for m in told], [m.grad_norm for m in told], weights


CASES = [
    ({"dp": 1, "cp": 2}, {}, 0.0, {}),
    ({"dp": 2, "cp": 2}, {}, 0.2, {"optimizer_level": 1}),
    (
        {"dp": 2, "cp": 2},
        {"order": "contiguous"},
        0.2,
        {"recompute": "full", "optimizer_level": 2, "accumulate": 2},
    ),
    ({"dp": 2, "cp": 2}, {"ulysses": 2}, 0.2, {"optimizer_level": 3}),
    ({"dp": 1, "cp": 4}, {"ulysses": 2}, 0.2, {"recompute": "full", "optimizer_level": 3}),
    ({"dp": 1, "cp": 4}, {"ulysses": 4}, 0.2, {"clip": 0.3}),
]


@pytest.mark.parametrize(("degrees", "settings", "p", "more"), CASES)
def test_a_run_on_cut_sequences_is_one_process(
    worlds: Any, degrees: dict[str, int], settings: dict[str, Any], p: float, more: dict[str, Any]
) -> None:
    """
    The same slices of rows in one process: losses, norms and weights agree, whatever is dropped.
    """
    lengths = (16, 13, 16)
    found = worlds(degrees["dp"] * degrees["cp"]).run(train, degrees, settings, p, lengths, **more)
    alone = {"accumulate": degrees["dp"] * more.get("accumulate", 1), "clip": more.get("clip")}
    wanted = worlds(1).run(train, {"dp": 1}, None, p, lengths, **alone)[0]
    for losses, norms, weights in found:
        assert losses == pytest.approx(wanted[0], rel=2e-6)
        assert norms == pytest.approx(wanted[1], rel=1e-5)
        for name, weight in weights.items():
            assert abs(weight - wanted[2][name]).max() < 5e-6, name


def in_bf16() -> tuple[list[float], list[float]]:
    """Return losses of a run in bf16 and in autocast."""
    found = []
    for precision in (Precision("bf16"), Precision("bf16", autocast=True)):
        run = make(
            {"dp": 1, "cp": torch.distributed.get_world_size()}, {}, 0.1, precision=precision
        )
        found.append([run.step(batch_of(6, 16, step)).loss for step in range(2)])
    return found[0], found[1]


def test_bf16(worlds: Any) -> None:
    found, wanted = worlds(2).run(in_bf16)[0], worlds(1).run(in_bf16)[0]
    for mine, alone in zip(found, wanted, strict=True):
        assert mine == pytest.approx(alone, rel=5e-3)


def prove(degrees: dict[str, int], settings: dict[str, Any], p: float, lost: bool) -> str:
    """Return what verify says, of a run whose table of positions is left out where ``lost``."""
    torch.manual_seed(0)
    context = ContextParallel(tables={} if lost else TABLES, **settings)
    model = Dropping(p)
    mesh = solve_mesh(torch.distributed.get_world_size(), degrees)
    run = parallelize(model, torch.optim.AdamW, loss, mesh=mesh, context=context, seed=3)
    assert run.memory(batch_of(4, 12, 0)).activations
    assert (
        "each sequence is sharded over 2 ranks; attention by a ring of 2, zigzag" in run.explain()
        or lost
    )
    return str(run.verify([batch_of(4, 12, step) for step in range(2)]))


def test_a_run_proves_itself(worlds: Any) -> None:
    for told in worlds(4).run(prove, {"dp": 2, "cp": 2}, {}, 0.1, False):
        assert told.count("in one process") == 2


def test_a_proof_finds_positions_that_were_not_told(worlds: Any) -> None:
    told = worlds(2).failures(prove, {"dp": 1, "cp": 2}, {}, 0.0, True)
    assert {kind for kind, _ in told} == {ConfigError.__name__}
    assert all("differs from one process" in text for _, text in told)


class Replacing:
    """A strategy that makes another module of what has a table."""

    def apply(self, model: Any, axes: Any, sample: Any) -> nn.Module:
        """See `tiles.Cutter`."""
        model.wpe.__class__ = nn.Embedding
        return model  # type: ignore[no-any-return]


def lost_table() -> None:
    """Make a step of a run whose strategy undoes a table."""
    make({"dp": 1, "cp": 2}, {}, 0.0, strategy=Replacing()).step(batch_of(4, 12, 0))


def test_a_table_that_a_strategy_undoes_is_missed(worlds: Any) -> None:
    for kind, text in worlds(2).failures(lost_table):
        assert (
            kind == UsageError.__name__
            and "the table wpe.weight is in a module that strategy= has replaced" in text
        )


def outputs() -> None:
    """Hold what a run evaluates against this rank's part of what its model gives for the whole."""
    run, batch = make({"dp": 1, "cp": 2}, {}, 0.0), batch_of(4, 13, 0)
    run.model.eval()
    (found,) = run.evaluate(batch)
    with torch.no_grad():
        whole = run.model(batch["tokens"])
    assert isinstance(run.state.sequence_slicer, ContextParallel)
    torch.testing.assert_close(
        found, run.state.sequence_slicer.sequences(run.axes).take_positions(whole, 1)
    )


def test_outputs_are_those_of_this_ranks_positions(worlds: Any) -> None:
    worlds(2).run(outputs)


def mean_loss() -> None:
    """Make a step with a loss that is a mean."""
    run = make({"dp": 1, "cp": 2}, {}, 0.0)
    run.state.objective.loss = lambda output, batch: f.cross_entropy(
        output.flatten(0, 1), batch["targets"].flatten()
    )
    run.step(batch_of(4, 12, 0))


def test_a_mean_is_refused(worlds: Any) -> None:
    for kind, text in worlds(2).failures(mean_loss):
        assert kind == UsageError.__name__ and "means of sequence parts cannot be added" in text


# ---- beside tensor axes -----------------------------------------------------


def train_zoo(
    case: zoo.Case, degrees: dict[str, int], settings: dict[str, Any], copies: int
) -> Any:
    """
    Train the zoo's model, whose heads and words are cut, on sequences that are cut; return losses
    and norms.
    """
    run = zoo.make(
        case,
        mesh=make_mesh(**degrees),
        strategy=Megatron("tp"),
        context=ContextParallel(**settings),
        copies=copies,
    )
    report = run.verify([zoo.batch_of(7, 1)])
    assert report.steps[0].max_difference < 1e-5
    told = [run.step(zoo.batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    return [m.loss for m in told], [m.grad_norm for m in told]


@pytest.mark.parametrize(("settings", "copies"), [({}, 1), ({"ulysses": 2}, 1), ({}, 2)])
def test_sequences_and_operators_are_cut_at_once(
    worlds: Any, settings: dict[str, Any], copies: int
) -> None:
    """What tensor parallel cuts of a rank's part of the sequence drops what the whole one drops."""
    case = zoo.Case(4, 2, dropout=True, tied=True, recompute="full", optimizer="SGD", rows=(24, 7))
    found = worlds(4).run(train_zoo, case, {"cp": 2, "tp": 2}, settings, copies)
    alone = zoo.Case(1, 0, copies, dropout=True, tied=True, optimizer="SGD", rows=(24, 7, 7))
    wanted = worlds(1).run(zoo.train, alone)[0]
    for losses, norms in found:
        assert losses == pytest.approx(wanted["loss"][:2], rel=2e-6)
        assert norms == pytest.approx(wanted["norm"][:2], rel=2e-5)
