"""Experts of other people's modules: fused ones of transformers, and lists."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh as meshes
from pdrun.parallel.layouts.grid import Grid
from tests.lib import tiers

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("transformers", "transformers.models.mixtral.modeling_mixtral")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
}


def build_family(family: str) -> nn.Module:
    config, model, more = FAMILIES[family]
    library = importlib.import_module("transformers")
    torch.manual_seed(0)
    made: nn.Module = getattr(library, model)(getattr(library, config)(**{**SIZES, **more}))
    for param in made.parameters():
        if param.dim() > 1:  # some are zero, and all are small
            nn.init.normal_(param, std=0.1)
    return made


def train_family(family: str, world: int, level: int) -> Any:
    """Prove a small model of a family, and train it."""
    ids = torch.randint(0, 61, (4, 6), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    run = pdrun.parallelize(
        build_family(family),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: out.loss,
        mesh=meshes.solve_mesh(world, {"ep" if world > 1 else "dp": world}),
        strategy=pdrun.Strategy(
            {"*.mlp.experts": pdrun.experts("ep")}
            if family != "granitemoe"
            else {"*.block_sparse_moe.experts": pdrun.experts("ep")}
        )
        if world > 1
        else None,
        optimizer_level=level,
        norm=True,
    )
    if world > 1:
        run.verify([batch])
    steps = [run.step(batch) for _ in range(2)]
    return [(each.loss, each.grad_norm) for each in steps], len(steps[-1].experts)


@pytest.mark.parametrize("family", tiers.mark_all_but(3, list(FAMILIES)))
def test_families_of_transformers(family: str, worlds: Any) -> None:
    pytest.importorskip("transformers")
    wanted, _ = worlds(1).run(train_family, family, 1, 0)[0]
    found, layers = worlds(2).run(train_family, family, 2, 3)[0]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert layers >= 1


class Expert(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 24), nn.Linear(24, 16), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class Listed(nn.Module):
    """A block as many write it: a loop over the experts that have tokens."""

    def __init__(self, normalize: bool = True, shared: bool = False, twist: float = 1.0) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.shared = Expert() if shared else None
        self.top_k, self.normalize, self.twist = 2, normalize, twist

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, 16)
        logits = self.gate(tokens)
        weights, index = logits.softmax(-1).topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(index == number)
            if len(row):
                part = expert(tokens[row]) * weights[row, place, None] * self.twist
                out = out.index_add(0, row, part)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x), logits


class ListModel(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(8, 16), Listed(**options), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.moe(hidden)[0])


def train_list(options: dict[str, Any], world: int, level: int, axis: str) -> Any:
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    batch = (torch.randn(6, 5, 8, generator=made), torch.randn(6, 5, 3, generator=made))
    run = pdrun.parallelize(
        ListModel(**options),
        lambda params: torch.optim.AdamW(params, 1e-2),
        lambda out, batch: ((out - batch[1]).square().sum(), out.numel()),
        mesh=meshes.solve_mesh(world, {axis if world > 1 else "dp": world}),
        strategy=pdrun.Strategy({"moe": pdrun.experts(axis)}) if world > 1 else None,
        optimizer_level=level,
        clip=0.1,
    )
    if world > 1:
        run.verify([batch])
    steps = [run.step(batch) for _ in range(3)]
    weights = {name: value.double().sum().item() for name, value in run.full_weights().items()}
    return [(each.loss, each.grad_norm) for each in steps], weights


@pytest.mark.parametrize(
    ("options", "level", "axis"),
    [({"normalize": True, "shared": True}, 2, "ep"), ({"normalize": False}, 0, "tp")],
)
def test_lists_of_experts(options: dict[str, Any], level: int, axis: str, worlds: Any) -> None:
    wanted, weights = worlds(1).run(train_list, options, 1, 0, axis)[0]
    found, mine = worlds(2).run(train_list, options, 2, level, axis)[0]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert mine == pytest.approx(weights, rel=1e-4, abs=1e-4)


class ListedInTraining(Listed):
    """A block that does more in training."""

    def __init__(self, trick: str) -> None:
        super().__init__(shared=True)
        self.trick = trick
        self.aux_loss: Any = None
        self.losses: list[Tensor] = []
        self.register_buffer("seen", torch.zeros(4))
        if trick == "dropout":
            self.experts = nn.ModuleList(Expert(0.5) for _ in range(4))
        if trick == "shared dropout":
            self.shared = Expert(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.trick == "noise":
            x = x + torch.rand_like(x)
        out, logits = super().forward(x)
        shares = logits.softmax(-1).detach()
        if self.trick == "aux loss":
            self.aux_loss = shares.square().mean()
        if self.trick == "list of losses" and self.training:
            self.losses.append(shares.mean())
        if self.trick == "buffer" and self.training:
            self.seen += shares.sum(0)
        return out, logits


@pytest.mark.parametrize(
    ("trick", "text"),
    [
        ("noise", "computes something else in training"),
        ("dropout", "computes something else in training"),
        ("aux loss", "its forward sets aux_loss, which would stay as it is"),
        ("list of losses", "its forward sets losses"),
        ("buffer", "its forward sets seen"),
    ],
)
def test_lists_that_do_more_in_training_are_refused(trick: str, text: str) -> None:
    model = ListModel()
    model.moe = ListedInTraining(trick)
    assert text in refuse(model, pdrun.experts("ep"))


@pytest.mark.parametrize("trick", ["", "shared dropout"])
def test_lists_that_do_the_same_in_training_are_cut(trick: str) -> None:
    model = ListModel()
    model.moe = ListedInTraining(trick)
    plan = pdrun.Strategy({"moe": pdrun.experts("ep")}).plan(model, Grid(("ep",), (2,)))
    assert [site.name for site in plan.sites] == ["moe"]


def refuse(model: nn.Module, style: Any, grid: Grid | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        pdrun.Strategy({"moe": style}).plan(model, grid or Grid(("dp", "ep", "tp"), (1, 2, 1)))
    return str(caught.value)


def test_modules_that_cannot_be_cut() -> None:
    style = pdrun.experts("ep")
    assert "does not compute the sum of the 2 best" in refuse(ListModel(twist=2.0), style)
    model = ListModel()
    del model.moe.top_k
    assert "no attribute says how many experts" in refuse(model, style)
    assert "top_k=9 is more than its 4 experts" in refuse(ListModel(), pdrun.experts("ep", top_k=9))
    holder = nn.Module()
    holder.moe = nn.Linear(4, 4)
    assert "a Linear has no experts of a known kind" in refuse(holder, style)
    holder.moe = pdrun.MoE(16, 24, experts=4, top_k=2)
    told = refuse(holder, pdrun.experts("ep", top_k=4))
    assert "top_k=4 has no effect: a MoE is routed by the model" in told
    three = Grid(("dp", "ep", "tp"), (1, 3, 1))
    assert "4 experts cannot be split evenly over 3 ranks (ep); these fit: 1, 2, 4" in refuse(
        ListModel(), style, three
    )
    both = Grid(("dp", "ep", "tp"), (1, 2, 2))
    told = refuse(ListModel(), pdrun.experts(("tp", "ep")), both)
    assert "axes must be in the order of the mesh, ('ep', 'tp')" in told
    wrong: Any
    for wrong in (None, 3, (), ("ep", 3)):
        with pytest.raises(UsageError, match="axis must be the name of an axis, or several"):
            pdrun.experts(wrong)
    with pytest.raises(UsageError, match="dp is not a tensor axis"):
        pdrun.Strategy({"moe": pdrun.experts("dp")}).plan(ListModel(), both)
    with pytest.raises(UsageError, match="ep is not a tensor axis"):
        pdrun.Strategy({"first": pdrun.col("ep")}).plan(ListModel(), both)
