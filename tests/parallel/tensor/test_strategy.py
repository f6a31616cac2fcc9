"""
Strategies are held against a model before anything is changed: every mistake says which module, and
what to do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.tensor import Strategy, col, cross_entropy, heads, replicate, row, seq, vocab
from tests.lib.decoder_model import build, strategy

pytestmark = pytest.mark.torch
GRID = Grid(("dp", "tp"), (1, 4))
RULES = strategy().rules


def mistake(rules: dict[str, Any], model: nn.Module | None = None, grid: Grid = GRID) -> str:
    model = model or build()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(UsageError) as caught:
        Strategy(rules).plan(model, grid)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), before[name], rtol=0, atol=0)
    return str(caught.value)


def test_a_glob_that_matches_nothing() -> None:
    told = mistake({"layers.0.mlp.dwon": row("tp")})
    assert (
        told == "Strategy: 'layers.0.mlp.dwon' matches no module; did you mean 'layers.0.mlp.down'?"
    )
    assert "did you mean 'layers.*.attn.wo'?" in mistake({"layers.*.atn.wo": row("tp")})
    assert "'hed' matches no module; did you mean 'head'?" in mistake({"emb|hed": vocab("tp")})


def test_a_module_with_two_styles() -> None:
    told = mistake({"*.wq": col("tp"), "layers.0.*.w[qk]": col("tp", gather=True)})
    assert (
        told == "Strategy, layers.0.attn.wq: it has two styles: '*.wq' (columns over tp) and"
        " 'layers.0.*.w[qk]' (columns over tp, gathered); make one of the globs narrower"
    )
    Strategy({"*.up": col("tp"), "layers.0.mlp.up": col("tp"), "*.down": row("tp")}).plan(
        build(), GRID
    )


def test_heads_that_do_not_divide_name_the_module_and_what_fits() -> None:
    told = mistake(RULES, build(n_heads=8, n_kv=8), Grid(("tp",), (3,)))
    assert (
        told == "Strategy, layers.0.attn: 8 heads cannot be split over 3 ranks (tp); "
        "these numbers of ranks fit: 1, 2, 4, 8"
    )
    told = mistake(RULES, build(n_heads=16, n_kv=2), Grid(("tp",), (32,)))
    assert (
        "16 heads with 2 of keys and values cannot be split over 32 ranks (tp); "
        "these numbers of ranks fit: 1, 2, 4, 8, 16" in told
    )


def test_tied_weights_that_would_be_cut_differently() -> None:
    told = mistake({"emb": vocab("tp")}, build(tied=True))
    assert (
        told == "Strategy, head.weight: it is tied to emb.weight, which is sharded differently; "
        "use one style for both: vocab(axis) for an embedding and its head"
    )
    assert "head.weight: it is tied to emb.weight" in mistake(
        {"emb": vocab("tp"), "head": row("tp", cut=True)}, build(tied=True)
    )


def test_a_weight_without_a_style_in_an_attention() -> None:
    rules = {key: value for key, value in RULES.items() if "wo" not in key}
    told = mistake(rules)
    assert (
        told
        == "Strategy, layers.0.attn.wo.weight: it has no style, but layers.0.attn is sharded by"
        " heads; replicate('tp') if it works on a rank's heads, replicate() if it works on all"
    )


def test_norms_without_a_style_where_the_sequence_is_sharded() -> None:
    """Their gradients would be those of a part of the sequence, on each rank of another."""
    rules = {
        key: value for key, value in strategy(sequence=True).rules.items() if "norm" not in key
    }
    told = mistake(rules)
    assert told.startswith(
        "Strategy, layers.0.norm1.weight: it has no style, but emb shards the sequence"
    )
    assert (
        "seq(axis) if it works on shards of the sequence, replicate() if on full sequences" in told
    )


def test_axes_that_do_not_exist() -> None:
    assert "dp is not a tensor axis: weights cannot be sharded over it" in mistake(
        {"head": vocab("dp")}
    )
    assert "there is no axis 'x'" in mistake({"head": vocab("x")})


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_modules_that_a_style_cannot_cut() -> None:
    model = nn.Sequential(
        nn.LayerNorm(8), Scaled(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8, max_norm=1.0), nn.ReLU()
    )
    assert "Strategy, 0: a LayerNorm is not a linear module" in mistake({"0": col("tp")}, model)
    assert "Strategy, 1: Scaled overrides forward" in mistake({"1": row("tp")}, model)
    assert (
        "Strategy, 3: an embedding with max_norm cannot be sharded over the vocabulary"
        in mistake({"3": vocab("tp")}, model)
    )
    assert "Strategy, 4: a ReLU is not a linear module" in mistake({"4": vocab("tp")}, model)
    nn.utils.parametrizations.weight_norm(model[2])
    assert "Strategy, 2: its weights must be weight and bias, got bias" in mistake(
        {"2": col("tp")}, model
    )
    model[1].forward = model[1].forward  # as wrappers do
    assert "Strategy, 1: its forward has been replaced on the object" in mistake(
        {"1": col("tp")}, model
    )


def test_attentions_of_torch_that_are_not_cut() -> None:
    model = nn.Sequential(
        nn.MultiheadAttention(8, 4), nn.MultiheadAttention(8, 4, add_zero_attn=True)
    )
    assert "0: heads shards all of torch's attention, but out_proj has a style, too" in mistake(
        {"0": heads("tp"), "0.out_proj": row("tp")}, model
    )
    assert "1: an attention with add_bias_kv or add_zero_attn cannot be sharded" in mistake(
        {"1": heads("tp")}, model
    )


def test_parts_that_would_be_empty_or_uneven_over_two_axes() -> None:
    two = Grid(("x", "y"), (2, 2))
    assert "3 cannot be split into 4 parts over tp: some would be empty" in mistake(
        {"head": vocab("tp")}, build(words=3)
    )
    assert "37 must be a multiple of 4 to be sharded over several axes" in mistake(
        {"head": vocab(("x", "y"))}, grid=two
    )


def test_q_k_and_v_in_one_matrix_of_unknown_order() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv, self.out = 4, nn.Linear(16, 48), nn.Linear(16, 16)

    model = nn.Sequential(Attention())
    rules = {"0": heads("tp"), "0.qkv": col("tp"), "0.out": row("tp")}
    assert "Strategy, 0.qkv: the order of q, k and v in its output is unknown" in mistake(
        rules, model
    )
    assert "0.qkv: its output of 48 must be a multiple of blocks=5" in mistake(
        {**rules, "0.qkv": col("tp", blocks=5)}, model
    )
    assert "a block of 24 must be a multiple of" in mistake(
        {**rules, "0.qkv": col("tp", blocks=2)}, model
    )
    assert "blocks must add up to its output of 48, got (16, 16)" in mistake(
        {**rules, "0.qkv": col("tp", blocks=(16, 16))}, model
    )
    model[0].num_key_value_heads, model[0].qkv = 2, nn.Linear(16, 32)
    grouped = {**rules, "0.qkv": col("tp", blocks=(16, 8, 8))}
    two = Grid(("tp",), (2,))
    assert "the order of q, k and v" in mistake(rules, model, two)
    assert Strategy(grouped).plan(model, two, 1).shards["0.qkv.weight"].ranges[0] == (
        (8, 16),
        (20, 24),
        (28, 32),
    )
    four = Strategy(grouped).plan(model, GRID, 1)
    assert four.shards["0.qkv.weight"].is_full  # fewer keys than ranks: each uses a part
    assert "2 heads of keys and values on 4 ranks are supported in one matrix if" in mistake(
        {**rules, "0.qkv": col("tp", blocks=(32,))}, model
    )
    del model[0].num_heads
    assert "Strategy, 0: the number of heads of a Attention is unknown" in mistake(rules, model)
    assert "Strategy, 0: its width must be a number of heads, got None" in mistake(
        {**rules, "0": heads("tp", heads="width")}, model
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: col("tp", gather=True, blocks=3),
        lambda: col(3),
        lambda: col(()),
        lambda: row("tp", sequence="1"),
        lambda: col("tp", blocks=0),
        lambda: col("tp", blocks=()),
        lambda: Strategy({"head": "col"}),
        lambda: cross_entropy(torch.ones(2, 3), torch.zeros(3)),
        lambda: cross_entropy(torch.ones(1, 3), torch.zeros(1), reduction="x"),
    ],
)
def test_invalid_arguments_of_styles(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()


def test_a_plan_says_what_is_cut_and_what_is_not() -> None:
    plan = Strategy({**RULES, "layers.0.norm1.weight": replicate()}).plan(
        build(n_kv=2), GRID, rank=3
    )
    assert list(plan.lines()) == [
        "vocabulary over tp: emb, head",
        "heads over tp: layers.0-1.attn",
        "columns over tp: layers.0-1.attn.wq, layers.0-1.mlp.gate, layers.0-1.mlp.up",
        (
            "replicated over tp, each rank computes one of 2 heads: layers.0-1.attn.wk,"
            " layers.0-1.attn.wv"
        ),
        "rows over tp: layers.0-1.attn.wo, layers.0-1.mlp.down",
        "dim -1 sharded over tp: layers.0-1.mlp.thin",
        "replicated: layers.0.norm1.weight",
        (
            "not matched, replicated: layers.0-1.norm1.bias, layers.0-1.norm2.weight,"
            " layers.0-1.norm2.bias, layers.1.norm1.weight, norm.weight, norm.bias"
        ),
    ]
    assert plan.shards["layers.1.mlp.up.weight"].ranges == (((38, 50),), ((0, 32),))
    assert plan.shards["layers.1.attn.wk.weight"].sum_axes == ("tp",)
    assert plan.shards["emb.weight"].local_shape == (9, 32)


def test_norms_between_sequence_parts_have_gradients_to_be_summed() -> None:
    plan = strategy(sequence=True).plan(build(), GRID)
    assert plan.unmatched == ()
    for name, tile in plan.shards.items():
        partial = "norm" in name or name.endswith(("wo.bias", "down.bias"))
        assert tile.sum_axes == (("tp",) if partial else ()), name
    assert isinstance(strategy(sequence=True).rules["*norm*|layers.*.drop"], type(seq("tp")))
