"""What programs do around a run: the numbers stay those of one process, or the program is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.zero import optimizer as retarget
from pdrun.parallel.zero.flat_layout import make_flat_layout
from pdrun.parallel.zero.grad_norm import square_sum
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-2)


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.float().square().sum(), len(output)


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


def rows(step: int = 0, count: int = 8) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(step))


# ---- an overflow under clipping ---------------------------------------------


def overflow(level: int) -> tuple[int, float, float]:
    """
    Train where the first steps overflow; return how many were left out, the last norm and the
    scale.
    """
    policy = pdrun.Precision("fp16", scale=2.0**30)
    run = pdrun.parallelize(mlp(), adam, loss, optimizer_level=level, precision=policy, clip=1.0)
    told = [run.step(rows(step)) for step in range(30)]
    assert run.state.loss_scale is not None
    return (
        sum(metrics.skipped for metrics in told),
        float(told[-1].grad_norm or "nan"),
        run.state.loss_scale.value,
    )


@pytest.mark.parametrize("level", [0, 1])
def test_an_overflow_under_clipping_costs_steps_and_no_more(level: int, worlds: Worlds) -> None:
    """Padding that was once multiplied with nan had made every later norm nan."""
    for skipped, norm, scale in [overflow(level), *worlds(2).run(overflow, level)]:
        assert 1 <= skipped < 25 and 0 < norm < 1e3 and 1 < scale < 2.0**30


def test_gaps_are_all_that_is_no_weight() -> None:
    for shapes in ([("a", (3,)), ("b", (64,)), ("c", (5, 13))], [("a", (64, 2))], [("a", ())]):
        for shards in (1, 2, 3):
            layout = make_flat_layout(shapes, shards, shards)
            held = [*layout.slot_extents, *layout.padding_extents]
            found = sorted(place for low, high in held for place in range(low, high))
            assert found == list(range(layout.numel)) and all(
                low < high for low, high in layout.padding_extents
            )


# ---- what a program draws between steps -------------------------------------


def drawn() -> tuple[list[float], list[float]]:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    torch.manual_seed(5)
    alone = [float(torch.rand(())) for _ in range(6)]
    run = pdrun.parallelize(model, sgd, loss, accumulate=2)
    torch.manual_seed(5)
    found = [float(torch.rand(()))]
    run.step(rows())
    found.append(float(torch.rand(())))
    run.evaluate(rows())
    found.append(float(torch.rand(())))
    run.verify([rows()])
    found.append(float(torch.rand(())))
    run.memory(rows())
    found.append(float(torch.rand(())))
    with pytest.raises(UsageError, match="no rows"):
        run.step(rows()[:0])
    return [*found, float(torch.rand(()))], alone


def test_a_step_draws_nothing_from_the_programs_generator(worlds: Worlds) -> None:
    """
    Ranks are seeded by slice inside it: a batch that a loop draws would differ from the second step
    on.
    """
    for found, alone in [drawn(), *worlds(2).run(drawn)]:
        assert found == alone


# ---- equal starts -----------------------------------------------------------


class Sliced(nn.Module):
    """Weights and buffers whose elements do not lie side by side, or share their place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(6, 12, generator=dice)[:, ::2])
        self.t = nn.Parameter(torch.randn(4, 6, generator=dice).T)
        self.register_buffer("part", torch.randn(6, 9, generator=dice)[:, :4])
        self.register_buffer("mask", torch.full((1, 4), float(seed)).expand(4096, 4))
        self.again = nn.Module()
        self.again.register_buffer("mask", self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w @ self.t + x @ self.part + self.mask[: len(x)]) @ self.part.T


def sliced(folder: str) -> dict[str, list[float]]:
    rank = pdrun.init().rank
    model = Sliced(rank + 1)
    run = pdrun.parallelize(model, sgd, loss)
    assert run.model.mask is run.model.again.mask
    found = {
        name: tensor.detach().flatten()[:200].tolist()
        for name, tensor in run.model.state_dict().items()
    }
    run.step(rows())
    run.save(folder)
    run.load(folder)
    return found


def test_all_ranks_start_with_rank_0s_model_however_it_lies_in_memory(
    worlds: Worlds, tmp_path: Any
) -> None:
    whole = {
        name: tensor.flatten()[:200].tolist() for name, tensor in Sliced(1).state_dict().items()
    }
    for found in [sliced(str(tmp_path / "one")), *worlds(2).run(sliced, str(tmp_path / "two"))]:
        assert found == {name: pytest.approx(value, abs=0) for name, value in whole.items()}


# ---- what is refused --------------------------------------------------------


def refused(make: Callable[[], nn.Module], **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        pdrun.parallelize(make(), sgd, loss, **options)
    return str(caught.value)


def test_a_forward_that_changes_weights() -> None:
    tables = (nn.Embedding(5, 4, max_norm=1.0), nn.EmbeddingBag(5, 4, max_norm=0.5))
    for options in ({"optimizer_level": 1}, {"precision": "bf16"}, {"offload": "optimizer"}):
        told = refused(lambda: nn.Sequential(tables[0], nn.Linear(4, 1)), **options)
        assert "0: max_norm=1 is not supported" in told
    assert "max_norm=0.5" in refused(lambda: nn.ModuleDict({"bag": tables[1]}), optimizer_level=3)
    run = pdrun.parallelize(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), sgd, loss)
    run.step(torch.tensor([1, 2, 3]))


def resting(sync: bool) -> str:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run = pdrun.parallelize(model if sync else model.eval(), sgd, loss, sync_batchnorm=sync)
    run.step(rows())
    run.model.train()
    try:
        run.step(rows())
    except UsageError as error:
        run.model.eval()
        run.step(rows())
        return str(error)
    return ""


def test_a_batch_norm_that_is_put_into_training_later(worlds: Worlds) -> None:
    found = worlds(2).run(resting, False)
    assert all(
        told.startswith("pdrun.Run.step: 1 was put into training mode after parallelize")
        for told in found
    )
    assert worlds(2).run(resting, True) == ["", ""] and resting(False) == ""


class Lamb(torch.optim.Optimizer):
    """Looks at a whole weight at a time."""

    def __init__(self, params: Any, lr: float | torch.Tensor) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.norm() * param.grad / param.grad.norm()


class Idle(torch.optim.Optimizer):
    """Moves nothing that could be looked at."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.1, torch.tensor(0.0)])
def test_whether_an_optimizer_is_elementwise_does_not_depend_on_its_rate(rate: Any) -> None:
    params = [nn.Parameter(torch.ones(4))]
    with pytest.raises(UsageError, match="Lamb cannot be sharded"):
        retarget.check_elementwise(Lamb(params, rate), torch.device("cpu"))
    for kind in (
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
    ):
        if not (isinstance(rate, torch.Tensor) and kind is torch.optim.Adadelta):
            made = kind(params, lr=rate)
            retarget.check_elementwise(made, torch.device("cpu"))
            assert made.param_groups[0]["lr"] is rate
    with pytest.raises(UsageError, match="Idle"):
        retarget.check_elementwise(Idle(params), torch.device("cpu"))


def test_weights_that_are_changed_where_the_optimizer_has_its_own() -> None:
    run = pdrun.parallelize(mlp(), sgd, loss, precision="bf16")
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.step(rows())
    run.step(rows())
    run.model.load_state_dict(before)
    with pytest.raises(
        UsageError, match=r"^pdrun.Run.step: 0.weight was changed in place: .* run.load_weights"
    ):
        run.step(rows())


def test_taking_up_weights_the_right_way_is_no_change(tmp_path: Any) -> None:
    for level in (0, 1):
        run = pdrun.parallelize(mlp(), sgd, loss, precision="bf16", optimizer_level=level)
        run.export(tmp_path / "whole.safetensors")
        first = run.step(rows()).loss
        run.save(tmp_path / f"kept-{level}")
        second = run.step(rows()).loss
        run.load_weights(tmp_path / "whole.safetensors")
        assert run.step(rows()).loss == first
        run.load(tmp_path / f"kept-{level}")
        assert run.step(rows()).loss == second
        assert run.resume(tmp_path / f"kept-{level}") and run.step(rows()).loss == second


def test_weights_that_are_changed_where_they_are_the_optimizers() -> None:
    run = pdrun.parallelize(mlp(), sgd, loss)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    first = run.step(rows()).loss
    run.model.load_state_dict(before)
    assert run.step(rows()).loss == first


def test_groups_that_come_later() -> None:
    model = mlp()
    run = pdrun.parallelize(model, lambda params: sgd(params[:2]), loss, precision="bf16")
    run.step(rows())
    run.optimizer.add_param_group({"params": [model[2].weight]})
    with pytest.raises(
        UsageError,
        match="the optimizer has 3 tensors in 2 groups, it had 2 in 1 when parallelize was called",
    ):
        run.step(rows())


# ---- batches of a loop ------------------------------------------------------


def changed_batches(how: str) -> str:
    run = pdrun.parallelize(mlp(), sgd, lambda output, batch: (output.sum(), len(output)))
    loader = pdrun.Loader(torch.utils.data.TensorDataset(rows(0, 24)), 8)
    kept: Any = None
    try:
        for (x,), batch in ((batch, batch) for batch in run.data(loader)):
            if how == "evaluates another":
                run.evaluate((rows(),))
            if how == "late":
                batch, kept = kept or batch, batch
            run.step((x * 0.5,) if how == "changed" else batch)
        run.step((rows(),))  # the loop is over: a batch of one's own again
        for _ in run.data(loader):
            break
        run.step((rows(),))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "refused"),
    [("plain", False), ("evaluates another", False), ("changed", True), ("late", True)],
)
def test_a_loop_over_a_loader_steps_on_the_very_batch(how: str, refused: bool) -> None:
    """
    Its rows are this rank's already: what was made of it, or one before, would be cut once more, at
    any step.
    """
    told = changed_batches(how)
    assert ("the batch that run.data yielded last" in told) == refused and bool(told) == refused, (
        told
    )


# ---- verify -----------------------------------------------------------------


def test_verify_does_not_take_an_overflow_for_a_fault() -> None:
    run = pdrun.parallelize(
        mlp(), adam, loss, precision=pdrun.Precision("fp16", scale=2.0**30), clip=1.0
    )
    assert run.state.loss_scale is not None
    report = run.verify([rows()])
    assert report.steps[0].norm == pytest.approx(report.steps[0].reference_norm, rel=1e-2)
    assert run.state.loss_scale.value == 2.0**30 and run.step(rows()).skipped


# ---- complex weights --------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_a_norm_counts_imaginary_parts(exact: bool) -> None:
    value = torch.randn(7, 300, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for one in (value, value.T, value.conj()):
        found = float(square_sum([one, torch.ones(2)] if exact else [one], exact))
        assert found == pytest.approx(
            float(value.abs().double().square().sum()) + 2 * exact, rel=1e-6
        )


# ---- hooks on weights -------------------------------------------------------


def noted(kept: list[Any]) -> Callable[[torch.Tensor], None]:
    return lambda grad: kept.append(float(grad.sum()))


def masked(grad: torch.Tensor) -> torch.Tensor:
    return grad * (torch.arange(grad.numel()).view(grad.shape) % 2)


HOOKS: dict[str, tuple[str, Any, str]] = {
    "limits": (
        "register_hook",
        lambda grad: grad.clamp(-0.01, 0.01),
        "0.weight has a hook on its gradient that is",
    ),
    "normalises": ("register_hook", lambda grad: grad / grad.norm(), "is not linear"),
    "signs": ("register_hook", lambda grad: grad.abs(), "is not linear"),
    "fails": ("register_hook", lambda grad: grad.nothing, "is not linear"),
    "takes": (
        "register_post_accumulate_grad_hook",
        lambda param: None,
        "which would run before the gradient is",
    ),
    "masks": ("register_hook", masked, ""),
    "notes": ("register_hook", noted([]), ""),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_whose_numbers_would_depend_on_the_ranks(name: str, late: bool) -> None:
    """
    A limit of each rank's gradient of a sum had been another one on each number of ranks, without a
    word.
    """
    method, hook, told = HOOKS[name]
    model = mlp()
    if not late:
        getattr(model[0].weight, method)(hook)
    try:
        run = pdrun.parallelize(model, sgd, loss, accumulate=2)
        run.step(rows())
        if late:
            getattr(model[0].weight, method)(hook)
        run.step(rows())
        run.step(rows())
    except UsageError as error:
        assert (
            told
            and told in str(error)
            and str(error).startswith("pdrun.Run.step" if late else "pdrun.parallelize")
        )
    else:
        assert not told


def under_a_mask(level: int, tensor: bool) -> dict[str, torch.Tensor]:
    model = mlp()
    model[2].weight.register_hook(masked)
    strategy = pdrun.Strategy({"0": pdrun.col("tp", gather=True)}) if tensor else None
    mesh = pdrun.mesh(tp=2) if tensor else None
    run = pdrun.parallelize(model, sgd, loss, optimizer_level=level, mesh=mesh, strategy=strategy)
    for step in range(3):
        run.step(rows(step))
    found = {name: weight.detach().clone() for name, weight in run.full_weights().items()}
    run.verify([rows(3)])  # its copy has the hooks, too
    return found


def test_a_mask_of_gradients_is_kept(worlds: Worlds) -> None:
    model = mlp()
    model[2].weight.register_hook(masked)
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        total, count = loss(model(rows(step)), None)
        (total / count).backward()
        optimizer.step()
    want = dict(model.named_parameters())
    for level, tensor in ((0, False), (3, False), (0, True)):
        for found in worlds(2).run(under_a_mask, level, tensor):
            for name, weight in found.items():
                torch.testing.assert_close(weight, want[name].detach(), rtol=1e-5, atol=1e-6)


def on_what_is_cut() -> str:
    model = mlp()
    model[0].weight.register_hook(masked)
    strategy = pdrun.Strategy({"0": pdrun.col("tp", gather=True)})
    return refused(lambda: model, mesh=pdrun.mesh(tp=2), strategy=strategy)


def test_a_hook_on_a_weight_that_is_cut(worlds: Worlds) -> None:
    for told in worlds(2).run(on_what_is_cut):
        assert "0.weight is sharded and has a hook on its gradient, which would get a shard" in told


# ---- what only sees its own rows, or no backward ----------------------------


def by_frequency() -> str:
    return refused(
        lambda: nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, 1))
    )


def test_gradients_divided_by_how_often_a_word_comes(worlds: Worlds) -> None:
    for told in worlds(2).run(by_frequency):
        assert "0: scale_grad_by_freq=True is not supported on several ranks" in told


class Mapped(nn.Module):
    """Calls its layers inside vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(self.layers)(x)


def mapped(gather: str) -> list[float] | str:
    run = pdrun.parallelize(Mapped(), sgd, loss, optimizer_level=3, gather=gather)
    try:
        return [run.step(rows(step)).loss for step in range(3)]
    except UsageError as error:
        return str(error)


def test_units_inside_vmap(worlds: Worlds) -> None:
    run = pdrun.parallelize(mlp(), sgd, loss, accumulate=2)
    want = [run.step(rows(step)).loss for step in range(3)]
    for found in worlds(2).run(mapped, "step"):
        assert found == pytest.approx(want, rel=1e-6)
    for told in worlds(2).run(mapped, "pass"):
        assert (
            'inside torch.func (vmap, grad) is not supported with gather="pass"; use gather="step"'
            in told
        )


# ---- hooks on modules under operators ---------------------------------------


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def by_operators(hook: str) -> list[float] | str:
    model, seen = mlp(), []
    if hook == "model":
        model.register_forward_hook(doubled)
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    if hook == "layer":
        model[0].register_forward_hook(doubled)
    if hook == "input":
        model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    if hook == "backward":
        model[0].register_full_backward_hook(lambda module, given, found: (given[0],))
    if hook == "looks":
        model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    options = {"mesh": pdrun.mesh(tp=2), "sample": rows(), "accumulate": 2}
    strategy = pdrun.Operators({"0": (None, pdrun.L("tp", None), None)})
    try:
        run = pdrun.parallelize(model, sgd, loss, strategy=strategy, **options)
        losses = [run.step(rows(step, count)).loss for step, count in enumerate((8, 8, 5))]
        assert bool(seen) == (hook == "looks")
        return losses
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("hook", ["model", "layer", "input", "backward", "looks"])
def test_hooks_on_modules_whose_operators_are_cut(hook: str, worlds: Worlds) -> None:
    """The model's own were computed twice, those for the backward not at all."""
    model = mlp()
    if hook == "model":
        model.register_forward_hook(doubled)
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    run = pdrun.parallelize(model, sgd, loss, accumulate=2)
    want = [run.step(rows(step, count)).loss for step, count in enumerate((8, 8, 5))]
    told = {
        "layer": "0 has a hook that changes its input or output",
        "input": "0 has a hook that changes its input or output",
        "backward": "pdrun.Operators: 0 has a backward hook",
    }
    for found in worlds(2).run(by_operators, hook):
        if hook in told:
            assert isinstance(found, str) and told[hook] in found
        else:
            assert found == pytest.approx(want, rel=1e-5)


# ---- what depends on the slices ---------------------------------------------


def contrast(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(
        output @ output.T, torch.arange(len(output)), reduction="sum"
    ), len(output)


def penalty(model: nn.Module) -> Any:
    return sum(weight.square().sum() for weight in model.parameters())


def with_penalty(model: nn.Module, batch: Any) -> Any:
    return model(batch), penalty(model)


def depends(what: str) -> tuple[bool, str]:
    """Return whether the report says that slices make a difference, and all that it says."""
    judges: dict[str, Any] = {
        "rows": contrast,
        "penalty": lambda output, batch: (loss(output[0], batch)[0] + output[1], len(batch)),
        "by count": lambda output, batch: (
            loss(output[0], batch)[0] + output[1] * len(batch),
            len(batch),
        ),
        "plain": loss,
    }
    forward = with_penalty if what in ("penalty", "by count") else None
    model = nn.Sequential(mlp(), nn.Dropout(0.5)) if what == "plain" else mlp()
    run = pdrun.parallelize(model, sgd, judges[what], forward=forward, accumulate=2)
    report = run.verify([rows(0), rows(1, 3)])
    return bool(report.row_dependence), str(report)


@pytest.mark.parametrize(
    ("what", "told"), [("rows", True), ("penalty", True), ("by count", False), ("plain", False)]
)
def test_verify_says_what_depends_on_the_slices(what: str, told: bool, worlds: Worlds) -> None:
    """Each number of ranks had trained another model, and `verify` had been content."""
    for across, text in [depends(what), *worlds(2).run(depends, what)]:
        assert across == told and ("two slices computed as one have another loss" in text) == told


def by_closure(level: int) -> str:
    model = mlp()
    options: Any = {"optimizer_level": level, "accumulate": 2}
    run = pdrun.parallelize(
        model, sgd, lambda out, batch: (out.sum() + penalty(model) * len(out), len(out)), **options
    )
    first = run.step(rows()).loss
    with pytest.raises(UsageError) as caught:
        run.verify([rows(1)])
    assert first == first and run.step(rows(1)).loss < first
    return str(caught.value)


@pytest.mark.parametrize("level", [0, 2])
def test_verify_of_a_loss_that_reads_the_runs_own_weights(level: int, worlds: Worlds) -> None:
    """
    The copy's gradients lacked what the loss had given to the run's own weights, in the middle of
    its sums.
    """
    for told in [by_closure(level), *worlds(2).run(by_closure, level)]:
        assert told.startswith(
            "pdrun.Run.verify: loss= or forward= uses 0.weight of the run's model"
        ), told


# ---- optimizer state in files -----------------------------------------------


class Hollow(nn.Module):
    """Has a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.none = mlp(), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.none.sum()


def filed(folder: str, level: int) -> tuple[list[float], list[float]]:
    away = pdrun.Offload(optimizer=True, disk=folder, activations=True, least=0)
    plain, run = (
        pdrun.parallelize(
            Hollow(), adam, loss, optimizer_level=level, accumulate=2, clip=0.5, **options
        )
        for options in ({}, {"offload": away})
    )
    return tuple([each.step(rows(step)).loss for step in range(4)] for each in (plain, run))


@pytest.mark.parametrize("level", [0, 3])
def test_state_in_files_has_the_same_numbers(level: int, worlds: Worlds, tmp_path: Any) -> None:
    for plain, run in [filed(str(tmp_path), level), *worlds(2).run(filed, str(tmp_path), level)]:
        assert plain == run
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_no_room_for_state_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to a mapped file without room ends the process."""

    def full(handle: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr("os.posix_fallocate", full)
    for folder, told in (("disk", "No space left on device"), ("file", "Not a directory")):
        away = pdrun.Offload(optimizer=True, disk=tmp_path / folder)
        run = pdrun.parallelize(mlp(), adam, loss, offload=away)
        with pytest.raises(
            ConfigError,
            match=rf"no space for 240 bytes of optimizer state \({told}\)",
        ):
            run.step(rows())
