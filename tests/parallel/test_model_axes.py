"""
Meshes with model axes: what is cut over operators, stages, data and micro-batches is what one
process computes.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdrun
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.comm import autograd as c
from pdrun.parallel.comm import mesh
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.model.shards import make_shard, set_shard
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.run import Run
from pdrun.parallel.zero.precision import Precision
from tests.lib import small_models as zoo
from tests.lib import tiers
from tests.lib.manual_sharding import Megatron
from tests.lib.manual_stages import Stages
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case
from tests.parallel.test_known_faults import pair, sgd, square_loss

pytestmark = pytest.mark.torch

Degrees = dict[str, int]


def make(case: Case, degrees: Degrees, **more: Any) -> Run:
    """Return a case's run on a mesh; ``case.world`` is that of all its ranks."""
    names = [name for name in degrees if name not in mesh.FIXED_AXES]
    if degrees.get("pp", 1) > 1:
        more["pipeline"], case = Stages(case.accumulate), dataclasses.replace(case, accumulate=1)
    return zoo.make(case, mesh=mesh.make_mesh(**degrees), strategy=Megatron(*names), **more)


def proven(case: Case, degrees: Degrees) -> Any:
    """Prove and train; return losses and norms."""
    run = make(case, degrees)
    run.verify([zoo.batch_of(rows, 9) for rows in sorted(set(case.rows))])
    told = [run.step(zoo.batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    return [m.loss for m in told], [m.grad_norm for m in told]


def check(case: Case, degrees: Degrees, worlds: Worlds, rel: float = 2e-5) -> None:
    """
    Prove a case, and compare its training with that of one process, and all ranks with each other.
    """
    found = worlds(case.world).run(proven, case, degrees)
    alone = dataclasses.replace(case.alone(), accumulate=degrees["dp"] * case.accumulate)
    want = worlds(1).run(zoo.train, alone)[0]
    for loss, norm in found:
        assert (loss, norm) == found[0]
        assert loss == pytest.approx(want["loss"], rel=rel)
        assert norm == pytest.approx(want["norm"], rel=10 * rel)


def cases() -> list[Any]:
    found = []
    for place, degrees in enumerate(
        ({"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 2})
    ):
        for level in range(4):
            turn = place + level
            odd = bool(turn % 2)
            found.append(
                (
                    Case(
                        degrees["dp"] * degrees["tp"],
                        level,
                        3 if odd else 1,
                        None if turn % 3 else "full",
                        not odd,
                        True,
                        (24, 7, 24),
                        0.3 if odd else None,
                    ),
                    degrees,
                )
            )
    return found


def cover_tensor_axes() -> list[Any]:
    """
    Return the cases; by default a cover of pairs of those that have more than a data axis. Four
    ranks of one axis send ten times as much as two: of these cases it has the one whose pair of
    level and recomputation no other case has.
    """
    pure = [drawn for drawn in cases() if drawn[1]["tp"] == 1]  # test_transparency.py has these
    cut = [drawn for drawn in cases() if drawn[1]["tp"] > 1]
    wide = [drawn for drawn in cut if drawn[1]["tp"] == 4]
    kept = [drawn for drawn in wide if (drawn[0].level, drawn[0].recompute) == (2, "full")]
    assert len(kept) == 1
    covered = tiers.cover_pairs([one for one in cut if one not in wide or one in kept], features_of)
    left_out = [drawn for drawn in (*wide, *pure) if drawn not in kept]
    return [*covered, *(tiers.thorough(drawn) for drawn in left_out)]


def features_of(drawn: Any) -> list[Any]:
    """Return what the product distinguishes in a case; how many ranks an axis has it does not."""
    case, degrees = drawn
    axes = [degrees["dp"] > 1, degrees["tp"] > 1]
    return [*axes, case.level, case.accumulate, case.recompute, case.dropout, case.clip]


@pytest.mark.parametrize("drawn", cover_tensor_axes(), ids=str)
def test_tensor_axes_compute_what_one_process_does(drawn: Any, worlds: Worlds) -> None:
    check(*drawn, worlds)


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        (Case(4, 2, clip=0.3), {"dp": 1, "x": 2, "y": 2}),
        (Case(4, 3, accumulate=2, tied=True), {"dp": 2, "x": 1, "y": 2}),
        (Case(4, 1, shard_group=1, optimizer="Adagrad"), {"dp": 2, "tp": 2}),
        (
            Case(4, 1, optimizer="SGD", more=(("offload", "all"), ("threshold", 2000))),
            {"dp": 2, "tp": 2},
        ),
        tiers.thorough(
            Case(4, 2, accumulate=2, more=(("exact", False), ("comm_fusion", False))),
            {"dp": 2, "tp": 2},
        ),
    ],
    ids=str,
)
def test_other_axes_and_options(case: Case, degrees: Any, worlds: Worlds) -> None:
    check(case, degrees, worlds)


BF16, FP16 = Precision("bf16"), Precision("fp16", scale=64.0)


@pytest.mark.parametrize(
    ("precision", "level"),
    [
        tiers.thorough(BF16, 0),
        tiers.thorough(BF16, 2),
        (BF16, 3),
        (FP16, 2),
        tiers.thorough(FP16, 0),
        tiers.thorough(FP16, 3),
    ],
    ids=lambda value: getattr(value, "compute", None),
)
def test_narrow_types(precision: Any, level: int, worlds: Worlds) -> None:
    check(
        Case(4, level, accumulate=2, clip=0.3, more=(("precision", precision),)),
        {"dp": 2, "tp": 2},
        worlds,
        3e-2,
    )


def overflown() -> list[bool]:
    run = make(Case(4, 1), {"dp": 1, "tp": 4}, precision=Precision("fp16", scale=2.0**18))
    return [run.step(zoo.batch_of(24, step)).skipped for step in range(12)]


def test_all_ranks_leave_the_same_steps_out(worlds: Worlds) -> None:
    """The gradients of a tile may overflow on one rank only."""
    found = worlds(4).run(overflown)
    assert found[0][0]
    assert not found[0][-1]
    assert all(told == found[0] for told in found)


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        (
            Case(2, 0, accumulate=3, tied=True, dropout=True, clip=0.3, rows=(24, 7, 24)),
            {"pp": 2, "dp": 1, "tp": 1},
        ),
        (Case(4, 0, accumulate=2, tied=True), {"pp": 2, "dp": 1, "tp": 2}),
        tiers.thorough(
            Case(4, 2, accumulate=2, tied=True, dropout=True, recompute="full"),
            {"pp": 2, "dp": 2, "tp": 1},
        ),
        (Case(3, 1, accumulate=2, tied=True, clip=0.3), {"pp": 3, "dp": 1, "tp": 1}),
        tiers.thorough(
            Case(4, 3, accumulate=2, tied=True, dropout=True, recompute="full"),
            {"pp": 2, "dp": 2, "tp": 1},
        ),
        tiers.thorough(  # tests/parallel/pipeline/test_sharded_weights.py has these
            Case(4, 3, accumulate=3, clip=0.3, more=(("gather", "pass"),)),
            {"pp": 2, "dp": 2, "tp": 1},
        ),
    ],
    ids=str,
)
def test_stages_compute_what_one_process_does(case: Case, degrees: Any, worlds: Worlds) -> None:
    check(case, degrees, worlds)


def grouped(degrees: Degrees | None, layerwise: tuple[str, ...]) -> Any:
    """Train with an optimizer that was made before, with two groups; return weights and losses."""
    model = zoo.build()
    wide = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    made = torch.optim.Adagrad(
        [{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}], lr=0.01
    )
    for group in made.param_groups:
        for param in group["params"]:
            made.state[param]["sum"].uniform_(
                generator=torch.Generator().manual_seed(param.numel())
            )
    where = {"mesh": mesh.make_mesh(**degrees), "strategy": Megatron()} if degrees else {}
    run = parallelize(
        model, made, zoo.token_loss, optimizer_level=1, layerwise=layerwise, clip=0.2, **where
    )
    told = [run.step(zoo.batch_of(24, step)).loss for step in range(3)]
    assert [len(group["params"]) > 0 for group in made.param_groups] == [True, True]
    return {name: value.tolist() for name, value in run.full_weights().items()}, told


@pytest.mark.parametrize("layerwise", [(), ("norm.*",)])
def test_an_optimizer_with_state_and_groups_follows_its_weights(
    layerwise: Any, worlds: Worlds
) -> None:
    """
    Every rank along the data axis has its own layerwise weights, so that there the neighbour is
    data parallel.
    """
    found = worlds(4).run(grouped, {"dp": 2, "tp": 2}, layerwise)
    want = worlds(2).run(grouped, None, layerwise)
    for rank, (weights, losses) in enumerate(found):
        expected, alone = want[rank // 2]
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in expected.items():
            assert torch.allclose(
                torch.tensor(weights[name]), torch.tensor(value), rtol=1e-4, atol=1e-6
            ), name


def read(case: Case, degrees: Degrees, folder: str, first: bool) -> list[float]:
    """Train on half of an epoch and save, or go on."""
    run = make(case, degrees)
    if not first:
        assert run.resume(folder)
    words = torch.arange(40 * (zoo.LENGTH + 1)).view(40, -1) * 7 % zoo.WORDS
    data = torch.utils.data.TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())
    told = []
    for batch in run.data(pdrun.Loader(data, 9, shuffle=True)):
        told.append(run.step(batch).loss)
        if first and len(told) == 2:
            run.save(folder)
    return told


def test_an_epoch_goes_on_on_another_mesh(worlds: Worlds, tmp_path: Path) -> None:
    """
    Ranks that differ along tensor axes and stages read the same rows; 40 rows are 4 batches of 9
    and one of 4.
    """
    before = worlds(4).run(read, Case(4, 2), {"dp": 2, "tp": 2}, str(tmp_path), True)
    after = worlds(4).run(
        read, Case(4, 0, accumulate=2), {"pp": 2, "dp": 1, "tp": 2}, str(tmp_path), False
    )
    assert len(before[0]) == 5
    assert all(told == before[0] for told in before)
    for told in after:
        assert told == pytest.approx(before[0][2:], rel=1e-5)


# ---- checkpoints and files --------------------------------------------------


def saved(case: Case, degrees: Degrees, folder: str, source: str | None = None) -> Any:
    """Train, or take up what others have trained, and save."""
    run = make(case, degrees)
    if source is None:
        run.step(zoo.batch_of(24, 0))
        run.step(zoo.batch_of(24, 1))
    else:
        run.load(source)
    path = run.save(folder).wait()
    torch.distributed.barrier()
    weights = {name: value.tolist() for name, value in run.full_weights().items()}
    return weights, str(path), run.step(zoo.batch_of(24, 2)).loss


MOVES = [
    tiers.thorough((4, 2, {"dp": 2, "tp": 2}), (4, 0, {"dp": 1, "tp": 4})),
    ((4, 0, {"dp": 1, "tp": 4}), (2, 3, {"dp": 2, "tp": 1})),
    ((2, 1, {"dp": 2, "tp": 1}), (4, 3, {"dp": 1, "x": 2, "y": 2})),
    ((4, 1, {"pp": 2, "dp": 1, "tp": 2}), (4, 3, {"dp": 2, "tp": 2})),
    ((4, 3, {"dp": 2, "tp": 2}), (4, 2, {"pp": 2, "dp": 2, "tp": 1})),
]


@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
def test_saved_on_one_mesh_taken_up_on_another(
    before: Any, after: Any, worlds: Worlds, tmp_path: Path
) -> None:
    """Weights and optimizer state have the same bits, and each is on the disk once."""
    one, two = (Case(world, level, tied=True) for world, level, _ in (before, after))
    found = worlds(one.world).run(saved, one, before[2], str(tmp_path / "a"))
    again = worlds(two.world).run(saved, two, after[2], str(tmp_path / "b"), found[0][1])
    assert all(told[0] == found[0][0] for told in [*found, *again])
    assert [told[2] for told in again] == pytest.approx([found[0][2]] * two.world, rel=1e-5)
    first, second = CheckpointReader(Path(found[0][1])), CheckpointReader(Path(again[0][1]))
    names = {name for name in first.tensor_names() if not name.startswith("rng/")}
    assert names == {name for name in second.tensor_names() if not name.startswith("rng/")}
    assert "state/blocks.0.qkv.weight/exp_avg" in names
    for name in names:
        assert torch.equal(first.read_tensor(name), second.read_tensor(name)), name
        for reader in (first, second):
            assert (
                sum(piece.region.numel for piece in reader.pieces_of(name))
                == first.read_tensor(name).numel()
            ), name


def exported(degrees: Degrees, path: str) -> bool:
    world = mesh.make_mesh(**degrees).size
    run = make(Case(world, 1), degrees)
    run.step(zoo.batch_of(24, 0))
    run.export(path)
    torch.distributed.barrier()
    other = make(Case(world, 0), degrees)
    other.load_weights(path)
    mine, theirs = run.full_weights(), other.full_weights()
    return all(torch.equal(value, theirs[name]) for name, value in mine.items()) and len(
        mine
    ) == len(theirs)


@pytest.mark.parametrize("degrees", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 2}], ids=str)
def test_export_and_import(degrees: Any, worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(4).run(exported, degrees, str(tmp_path / "model.safetensors")) == [True] * 4


def fill(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    for param in [] if hasattr(module, "reset_parameters") else module.parameters(recurse=False):
        param.fill_(1.0)


def filled(level: int, degrees: Degrees) -> Any:
    names = [name for name in degrees if name not in mesh.FIXED_AXES]
    with pdrun.empty_init():
        model = zoo.Tiny(tied=True)
    stages = {"pipeline": Stages(1)} if degrees.get("pp", 1) > 1 else {}
    run = parallelize(
        model,
        zoo.OPTIMIZERS["AdamW"],
        zoo.token_loss,
        mesh=mesh.make_mesh(**degrees),
        strategy=Megatron(*names),
        optimizer_level=level,
        init=fill,
        seed=3,
        **stages,
    )
    first = {name: value.tolist() for name, value in run.full_weights().items()}
    return first, run.step(zoo.batch_of(24, 0)).loss


@pytest.mark.parametrize(
    ("level", "degrees"),
    [(0, {"dp": 1, "tp": 4}), (3, {"dp": 2, "tp": 2}), (1, {"pp": 2, "dp": 1, "tp": 2})],
)
def test_weights_made_in_place_are_the_same_on_every_mesh(
    level: int, degrees: Any, worlds: Worlds
) -> None:
    want = worlds(1).run(filled, 0, {"dp": 1, "tp": 1})[0]
    for weights, loss in worlds(4).run(filled, level, degrees):
        assert weights == want[0]
        assert loss == pytest.approx(want[1], rel=1e-6)


def evaluated(level: int, degrees: Degrees) -> Any:
    run = make(Case(4, level, accumulate=2, dropout=True), degrees)
    run.model.eval()
    found = [(run.state.row_axis.index, out) for out in run.evaluate(zoo.batch_of(11, 0))]
    run.model.train()
    run.step(zoo.batch_of(11, 0))
    return [(index, None if out is None else out.tolist()) for index, out in found]


@pytest.mark.parametrize(
    ("level", "degrees"), [(3, {"dp": 2, "tp": 2}), (0, {"pp": 2, "dp": 1, "tp": 2})], ids=str
)
def test_outputs_without_training(level: int, degrees: Any, worlds: Worlds) -> None:
    """Slice ``a * dp + rank`` is micro-batch ``a`` of a rank: 11 rows in four slices, or in two."""
    with torch.no_grad():
        want = zoo.build().eval()(zoo.batch_of(11, 0)[0])
    parts = degrees["dp"] * 2
    bounds = [11 * part // parts for part in range(parts + 1)]
    for rank, told in enumerate(worlds(4).run(evaluated, level, degrees)):
        for place, (index, out) in enumerate(told):
            part = place * degrees["dp"] + index
            if degrees.get("pp", 1) > 1 and rank < 2:
                assert out is None
            else:
                assert torch.allclose(
                    torch.tensor(out), want[bounds[part] : bounds[part + 1]], atol=1e-5
                )


# ---- gradients that are partial, missing or unequal -------------------------


class Odd(nn.Module):
    """Two outputs, of which tensor ranks compute one each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 4)
        self.outs = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.outs[0](h) + self.outs[1](h)


class OddPart(Odd):
    """One output here, the other on the next rank."""

    def forward(self, x: Tensor) -> Tensor:
        h = c.copy_to_axis(self.inner(x), self.axis)
        return c.all_reduce(self.outs[self.axis.index](h), self.axis)


class Shares:
    """
    Gives each rank one of the outputs; all hold both. ``honest`` is whether it tells that gradients
    are partial.
    """

    def __init__(self, honest: bool = True) -> None:
        self.honest = honest

    def apply(self, model: Any, axes: MeshGroups, sample: Any) -> nn.Module:
        """See `tiles.Cutter`."""
        model.__class__, model.axis = OddPart, axes["tp"]
        for out in model.outs if self.honest else []:
            for param in out.parameters():
                dims = [None] * param.dim()
                set_shard(
                    param,
                    make_shard(
                        tuple(param.shape), L(*dims), axes.grid, axes.rank, sum_axes=("tp",)
                    ),
                )
        return model  # type: ignore[no-any-return]


def odd(level: int, honest: bool) -> Any:
    run = parallelize(
        Odd(),
        sgd,
        square_loss,
        mesh=mesh.make_mesh(dp=2, tp=2),
        strategy=Shares(honest),
        optimizer_level=level,
        clip=0.1,
    )
    run.verify([pair(12)])
    run.step(pair(12))
    sums = run.state.engine.place.sum_groups(("tp",), ())[0].calls["all_reduce"]
    return [value.tolist() for value in run.full_weights().values()], sums


def odd_alone() -> Any:
    run = parallelize(Odd(), sgd, square_loss, clip=0.1, accumulate=2)
    run.step(pair(12))
    return [value.tolist() for value in run.full_weights().values()]


@pytest.mark.parametrize("level", [0, 3])
def test_a_weight_that_one_tensor_rank_uses_is_trained_on_all(level: int, worlds: Worlds) -> None:
    want = worlds(1).run(odd_alone)[0]
    for weights, sums in worlds(4).run(odd, level, True):
        for mine, expected in zip(weights, want, strict=True):
            assert torch.allclose(torch.tensor(mine), torch.tensor(expected), rtol=1e-6)
        assert sums <= 2 * (
            1 if level == 0 else 2
        )  # fused, once a step: two steps, a sum for each bundle


def test_a_partial_gradient_that_nobody_told_of_is_found(worlds: Worlds) -> None:
    told = worlds(4).failures(odd, 0, False)
    assert {kind for kind, _ in told} == {"ConfigError"}
    assert all("differs from one process" in text and "outs." in text for _, text in told)


# ---- context ----------------------------------------------------------------


class Halves:
    """
    Gives each rank along cp its part of the sequences, for a model that looks at each position by
    itself.
    """

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any) -> nn.Module:
        """Leave the model as it is."""
        return model

    def part(self, batch: Any, axes: MeshGroups) -> Any:
        """Cut dim 1."""
        low, high = shard_range(batch[0].shape[1], axes["cp"].size, axes["cp"].index)
        return tuple(leaf[:, low:high] for leaf in batch)

    def describe(self, axes: MeshGroups) -> str:
        """See `pdrun.parallel.interfaces.SequenceCutter`."""
        return "positions are cut"

    def patched_attention(self, axes: MeshGroups) -> Any:
        """Nothing."""
        return nullcontext()


def words_only() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(zoo.WORDS, 8), nn.LayerNorm(8), nn.Linear(8, zoo.WORDS))


def along_cp(level: int) -> Any:
    run = parallelize(
        words_only(),
        sgd,
        zoo.token_loss,
        mesh=mesh.make_mesh(dp=2, cp=2),
        context=Halves(),
        optimizer_level=level,
        norm=True,
    )
    run.verify([zoo.batch_of(12, 0)])
    told = run.step(zoo.batch_of(12, 1))
    return told.loss, told.grad_norm, told.tokens


def along_nothing() -> Any:
    run = parallelize(words_only(), sgd, zoo.token_loss, norm=True)
    told = run.step(zoo.batch_of(12, 1))
    return told.loss, told.grad_norm, told.tokens


@pytest.mark.parametrize("level", [0, 1, 3])
def test_parts_of_sequences_are_summed_as_parts_of_batches_are(level: int, worlds: Worlds) -> None:
    want = worlds(1).run(along_nothing)[0]
    for told in worlds(4).run(along_cp, level):
        assert told == pytest.approx(want, rel=1e-5)


# ---- words ------------------------------------------------------------------


def explained() -> Any:
    run = make(Case(4, 2, accumulate=2, tied=True, dropout=True), {"dp": 2, "tp": 2})
    plan = run.plan
    assert plan.mesh == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    assert plan.tiles["blocks.0.up.weight"] == {
        "shape": [50, 24],
        "layout": "L('tp', None)",
        "sums": [],
    }
    assert plan.tiles["blocks.1.norm2.bias"]["sums"] == ["tp"]
    assert {tuple(part["sums"]) for part in plan.transfers} == {("dp",), ("dp", "tp")}
    return run.explain(zoo.batch_of(24, 0)).split("\n"), run.memory(zoo.batch_of(24, 0)).activations


def test_explain(worlds: Worlds) -> None:
    lines, activations = worlds(4).run(explained)[0]
    assert lines[0] == "mesh(dp=2, tp=2) on cpu: each batch is cut into 2 x 2 = 4 slices"
    assert any(
        line.startswith("sharded by L('tp', None): emb.weight, blocks.0.qkv.weight")
        for line in lines
    )
    assert any(
        line.startswith("gradients also summed over tp: blocks.0.norm2.weight") for line in lines
    )
    assert any(line.startswith("replicated over the tensor axes: never, ") for line in lines)
    assert "tied, counted once: emb.weight = head.weight" in lines
    assert any(line.startswith("exact over dp: ") for line in lines)
    assert activations > 10_000


def staged() -> list[str]:
    run = make(Case(2, accumulate=2, tied=True), {"pp": 2, "dp": 1, "tp": 1})
    return run.explain(zoo.batch_of(24, 0)).split("\n")


def test_explain_tells_of_stages(worlds: Worlds) -> None:
    first, second = worlds(2).run(staged)
    assert first[3].startswith("stage 0 of 2: ")
    assert second[3].startswith("stage 1 of 2: ")
    assert "shared by stages 0, 1: emb.weight" in first
    assert first[-1].endswith("activations are not counted: this is a stage")


class Elsewhere(Megatron):
    """Cuts over the data."""

    def apply(self, model: Any, axes: MeshGroups, sample: Any) -> nn.Module:
        """See `tiles.Cutter`."""
        old = model.never
        part = make_shard(tuple(old.shape), L("dp"), axes.grid, axes.rank)
        model.never = set_shard(nn.Parameter(part.take_from(old.detach())), part)
        return model  # type: ignore[no-any-return]


def refused(what: str) -> None:
    degrees: dict[str, Degrees] = {
        "strategy": {"tp": 2},
        "context": {"cp": 2},
        "pipeline": {"pp": 2},
    }
    options: dict[str, Any] = {
        "mesh": mesh.make_mesh(**degrees.get(what, {"tp": 2})),
        "strategy": Megatron(),
    }
    if what in degrees:
        del options["strategy"]
    elif what == "accumulate":
        options = {"mesh": mesh.make_mesh(pp=2), "pipeline": Stages(2), "accumulate": 2}
    elif what == "dropout":
        options["native_dropout"] = True
    elif what == "data":
        options = {"mesh": mesh.make_mesh(dp=2), "strategy": Elsewhere()}
    optimizer: Any = torch.optim.Muon if what == "muon" else torch.optim.SGD
    model = zoo.build()
    chosen = [param for param in model.parameters() if param.dim() == 2]
    parallelize(model, optimizer(chosen, lr=0.1), zoo.token_loss, **options)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "strategy",
            "mesh(dp=1, tp=2): ranks along tp would compute the same; pass strategy=",
        ),
        ("context", "ranks along cp would compute the same; pass context="),
        ("pipeline", "ranks along pp would compute the same; pass pipeline="),
        ("accumulate", "accumulate=2 is not supported with pipeline="),
        ("dropout", "native_dropout=True is not supported on mesh(dp=1, tp=2)"),
        ("data", "never is sharded over dp, which is not a tensor axis"),
        ("muon", "Muon cannot be sharded: its update of an element depends on other elements"),
    ],
)
def test_refused(what: str, text: str, worlds: Worlds) -> None:
    for kind, told in worlds(2).failures(refused, what):
        assert (kind, text in told) == ("UsageError", True), told
