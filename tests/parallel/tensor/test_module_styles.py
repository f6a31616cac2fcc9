"""Module styles: a cut model has the losses and gradients of the whole one, on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.model.meta_init import empty_init
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.tensor import Strategy, col, cross_entropy, heads, replicate, row, seq, vocab
from tests.lib import decoder_model as decoder
from tests.lib.decoder_model import (
    LENGTH,
    ROWS,
    WIDTH,
    axes_of,
    build,
    compare,
    strategy,
    tokens,
    whole_gradients,
)
from tests.lib.tiers import is_thorough, thorough

pytestmark = pytest.mark.torch
TP = Grid(("tp",), (4,))


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def same(
    names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any], how: dict[str, Any]
) -> None:
    """Compare a decoder with its cut copy, the plain one in both precisions."""
    both = not options or is_thorough()
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        batch = tokens(options.get("words", 37))
        loss = None if how.get("gather", True) else own_loss
        compare(build(dtype, **options), strategy(**how), Grid(names, sizes), batch, cut_loss=loss)


DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied": ({"bias": False, "tied": True}, {}),
    "cut-logits": ({"n_kv": 8, "tied": True, "padding": 3}, {"gather": False}),
    "two-kv-heads": ({"n_kv": 2, "words": 41}, {"gather": False}),
    "one-kv-head": ({"n_kv": 1}, {}),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("plain", "whole"), ("plain", "sequence"), ("tied", "whole"), ("two-kv-heads", "whole")),
        *(("cut-logits", "sequence"), ("one-kv-head", "sequence"), thorough("tied", "sequence")),
        *(thorough("cut-logits", "whole"), thorough("two-kv-heads", "sequence")),
        thorough("one-kv-head", "whole"),
    ],
)
def test_a_cut_model_equals_the_whole(worlds: Any, kind: str, way: str) -> None:
    (options, how), sequence = DECODERS[kind], way == "sequence"
    worlds(4).run(same, ("tp",), (4,), options, {**how, "sequence": sequence})


@pytest.mark.parametrize("axis", ["y", ("x", "y"), ("y", "x")])
def test_axes_of_any_name_and_several_at_once(worlds: Any, axis: Any) -> None:
    worlds(4).run(
        same,
        ("x", "y"),
        (2, 2),
        {"hidden": 48, "words": 40},
        {"axis": axis, "sequence": True, "hidden": 48},
    )


def test_a_data_axis_beside_it(worlds: Any) -> None:
    worlds(4).run(same, ("dp", "tp"), (2, 2), {}, {})


@pytest.mark.parametrize("sequence", [False, True])
def test_degree_one_goes_through_the_same_code(worlds: Any, sequence: bool) -> None:
    worlds(1).run(
        same, ("dp", "tp"), (1, 1), {"tied": True}, {"sequence": sequence, "gather": False}
    )


# ---- what modules can be ----------------------------------------------------


class Fused(nn.Module):
    """Gate and up side by side in one matrix, then sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.down = nn.Linear(WIDTH, 2 * 7), nn.Linear(7, WIDTH)
        self.wide, self.alone = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.pair(x).chunk(2, -1)
        return self.alone(self.wide(x + self.down(F.silu(gate) * up)))


def fused() -> None:
    torch.manual_seed(3)
    model = Fused().double()
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    how = {"down": row("tp"), "pair": col("tp", blocks=2)}
    for more in (
        {"wide": col("tp", gather=True)},
        {"wide": col("tp"), "alone": row("tp")},
        {"wide": replicate(), "alone": row("tp", cut=True)},
    ):
        compare(
            copy.deepcopy(model),
            Strategy({**how, **more}),
            Grid(("tp",), (2,)),
            x,
            lambda m, x: m(x).square().sum(),
        )


def test_fused_and_uneven_columns_meet_their_rows(worlds: Any) -> None:
    """A fused gate and up is cut in each half; five columns of two ranks fit five rows."""
    worlds(2).run(fused)


class Fusion(nn.Module):
    """
    An attention with one matrix for q, k and v, either all of q first or head by head, and a norm
    over a head.
    """

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.n_head, self.inner_dim, self.head_dim = by_head, 4, WIDTH, WIDTH // 4
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(x)
        if self.by_head:
            q, k, v = made.unflatten(-1, (self.n_head, 3, -1)).unbind(-2)
        else:
            q, k, v = (
                each.unflatten(-1, (self.n_head, -1)) for each in made.split(self.inner_dim, -1)
            )
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (self.q_norm(q), k, v))
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def fusion(by_head: bool) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(Fusion(by_head)).double()
    blocks = (3 * WIDTH,) if by_head else 3
    how = Strategy(
        {
            "*.qkv": col("tp", blocks=blocks),
            "*.out": row("tp"),
            "*.q_norm": replicate("tp"),
            "0": heads("tp"),
        }
    )
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    cut, _ = compare(model, how, TP, x, lambda m, x: m(x).square().sum())
    assert (cut[0].n_head, cut[0].inner_dim, cut[0].head_dim) == (1, WIDTH // 4, WIDTH // 4)
    assert shard_of(cut[0].q_norm.weight).sum_axes == ("tp",)


@pytest.mark.parametrize("by_head", [False, True])
def test_q_k_and_v_in_one_matrix(worlds: Any, by_head: bool) -> None:
    worlds(4).run(fusion, by_head)


def encoder_layer() -> None:
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 50, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    model = nn.Sequential(layer)
    how = Strategy({"0.self_attn": heads("tp"), "0.linear1": col("tp"), "0.linear2": row("tp")})
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    cut, _ = compare(model, how, TP, x, lambda m, x: m(x).square().sum())
    assert isinstance(cut[0].self_attn, nn.MultiheadAttention)
    with torch.no_grad():
        torch.testing.assert_close(
            cut.eval()(x), model.eval()(x)
        )  # where torch would take its own short cut


def multihead(options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    sizes = {key: options[key] for key in ("kdim", "vdim", "batch_first", "bias") if key in options}
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, 4, dtype=torch.float64, **sizes))
    first = options.get("batch_first", False)
    query, key, value = (
        torch.randn(
            (ROWS, size, width) if first else (size, ROWS, width),
            dtype=torch.float64,
            requires_grad=True,
        )
        for size, width in (
            (5, WIDTH),
            (6, options.get("kdim", WIDTH)),
            (6, options.get("vdim", WIDTH)),
        )
    )
    dice = torch.Generator().manual_seed(1)
    masks = torch.rand(ROWS * 4, 5, 6, generator=dice) < 0.2
    padding = torch.zeros(ROWS, 6, dtype=torch.bool)
    padding[0, 4:] = True
    call = {
        "key_padding_mask": padding,
        "attn_mask": masks if options["masks"] == 3 else masks[0],
        "average_attn_weights": options["average"],
        "need_weights": options["weights"],
    }

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        for x in (query, key, value):
            x.grad = None
        out, weights = model[0](query, key, value, **call)
        return out.square().sum() + (0 if weights is None else weights.square().sum())

    cut, _ = compare(model, Strategy({"0": heads("tp")}), TP, None, loss)
    want = [x.grad.clone() for x in (query, key, value)]
    loss(cut, None).backward()
    for x, grad in zip((query, key, value), want, strict=True):
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize(
    "options",
    [
        {"masks": 2, "average": True, "weights": True},
        {"masks": 3, "average": False, "weights": True, "batch_first": True},
        {
            "masks": 3,
            "average": True,
            "weights": False,
            "kdim": 20,
            "vdim": 12,
            "batch_first": True,
        },
        {"masks": 2, "average": True, "weights": False, "bias": False},
    ],
    ids=str,
)
def test_attention_of_torch_itself_is_cut_as_one(worlds: Any, options: Any) -> None:
    """
    Masks of every form, weights as output, keys and values of other widths, gradients of all
    inputs.
    """
    worlds(4).run(multihead, options)


def test_an_encoder_layer_of_torch(worlds: Any) -> None:
    worlds(4).run(encoder_layer)


class Edges(nn.Module):
    """A decoder's middle, which gets whole sequences and gives whole ones."""

    def __init__(self) -> None:
        super().__init__()
        model = build()
        self.layers, self.norm = model.layers, model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x=x) if layer is self.layers[0] else layer(x)
        return self.norm(x)


def edges(length: int) -> None:
    how = strategy(sequence=True).rules
    del how["emb|head"]
    cut_here = {
        "layers.0": seq("tp", cut=True),
        "norm": seq("tp", gather=True),
        "layers.*.norm?|layers.*.drop": seq("tp"),
    }
    del how["*norm*|layers.*.drop"]
    torch.manual_seed(2)
    x = torch.randn(ROWS, length, WIDTH, dtype=torch.float64)
    compare(Edges(), Strategy({**how, **cut_here}), TP, x, lambda m, x: m(x).square().sum())


def test_sequences_are_sliced_and_gathered_where_configured(worlds: Any) -> None:
    worlds(4).run(edges, LENGTH)


def test_a_sequence_that_does_not_divide_is_refused_with_the_place(worlds: Any) -> None:
    kind, text = worlds(4).failures(edges, 6)[0]
    assert kind == "UsageError"
    assert (
        text
        == "Strategy, layers.0: dim 1 of [3, 6, 32], the sequence, must be a multiple of 4; pad it"
        " to a multiple of 4"
    )


# ---- communication ----------------------------------------------------------


def counted(layers: int, sequence: bool) -> dict[str, tuple[int, int]]:
    _, axes = compare(build(layers=layers), strategy(sequence=sequence), TP, tokens())
    assert {over for _, over in axes.counts} == {("tp",)}
    return {name: (count.calls, count.nbytes) for (name, _), count in axes.counts.items()}


def test_a_layer_costs_four_all_reduces(worlds: Any) -> None:
    """Two forward, two backward (Megatron's closed form), however many modules read one input."""
    one, three = (worlds(4).run(counted, layers, False)[0] for layers in (1, 3))
    size = ROWS * LENGTH * WIDTH * 8
    assert three["all_reduce"][0] - one["all_reduce"][0] == 2 * 4
    assert three["all_reduce"][1] - one["all_reduce"][1] == 2 * 4 * size
    assert one["all_reduce"] == (4 + 2, 6 * size)  # the embedding forward, the head backward
    assert one["all_gather"][0] == three["all_gather"][0] == 1  # logits
    assert set(one) == {"all_reduce", "all_gather"}


def test_a_layer_with_sequence_parts_costs_four_gathers_and_four_scatters(worlds: Any) -> None:
    one, three = (worlds(4).run(counted, layers, True)[0] for layers in (1, 3))
    size = ROWS * LENGTH * WIDTH * 8
    assert three["all_gather"][0] - one["all_gather"][0] == 2 * 4
    assert three["reduce_scatter"][0] - one["reduce_scatter"][0] == 2 * 4
    assert three["all_gather"][1] - one["all_gather"][1] == 2 * 4 * size // 4  # of a part
    assert one["reduce_scatter"] == (4 + 2, 6 * size)  # embedding and head
    assert one["all_gather"][0] == 4 + 2 + 1
    assert set(one) == {"all_gather", "reduce_scatter"}


# ---- what stays as it was ---------------------------------------------------


def unchanged() -> None:
    model = build(tied=True)
    before = dict(model.named_modules())
    params = {name: id(param) for name, param in model.named_parameters()}
    names = list(model.state_dict())
    strategy().apply(model, axes_of(TP))
    assert {
        name: module is before[name] for name, module in model.named_modules()
    } == dict.fromkeys(before, True)
    assert {name: id(param) for name, param in model.named_parameters()} == params
    assert list(model.state_dict()) == names
    assert isinstance(model.layers[0].attn.wq, nn.Linear)
    assert model.emb.weight is model.head.weight
    assert model.emb.num_embeddings == 37
    assert tuple(model.emb.weight.shape) == ((10 if axes_of(TP).rank == 0 else 9), WIDTH)
    twin = copy.deepcopy(model)
    assert twin.layers[0].attn.wq.weight is not model.layers[0].attn.wq.weight
    ids = tokens()[0]
    with torch.no_grad():
        first = model(ids)
        torch.testing.assert_close(twin(ids), first, rtol=0, atol=0)
        torch.testing.assert_close(first, build(tied=True)(ids), rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), first, rtol=0, atol=0)


def test_modules_names_ties_and_copies_stay(worlds: Any) -> None:
    worlds(4).run(unchanged)


def filled_later() -> None:
    with empty_init():
        model = decoder.Decoder(tied=True)
    strategy(gather=False).apply(model, axes_of(TP))
    assert model.emb.weight is model.head.weight
    assert model.emb.weight.is_meta
    source = build(tied=True)
    for (
        module
    ) in model.modules():  # new objects, one after the other, as whoever makes weights real may do
        for param in list(module.parameters(recurse=False)):
            name = next(
                name
                for name, other in model.named_parameters(remove_duplicate=False)
                if other is param
            )
            made = nn.Parameter(shard_of(param).take_from(source.get_parameter(name).detach()))
            made._pdrun_shard = shard_of(param)
            for owner in model.modules():
                for place, other in list(owner._parameters.items()):
                    if other is param:
                        owner._parameters[place] = made
    own_loss(model, tokens()).backward()
    decoder.plain_loss(source, tokens()).backward()
    found = whole_gradients(model, axes_of(TP))
    for name, param in source.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-12)


def test_weights_are_found_by_their_module_when_others_take_their_place(worlds: Any) -> None:
    worlds(4).run(filled_later)


# ---- the loss of cut logits -------------------------------------------------


def entropies(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    whole = nn.Sequential(nn.Linear(6, 13)).to(dtype)
    cut = copy.deepcopy(whole)
    Strategy({"0": vocab("tp", gather=False)}).apply(cut, axes_of(TP))
    x, y = torch.randn(4, 5, 6, dtype=dtype), torch.randint(13, (4, 5))
    y[0, :3] = 7
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            for ignored in (-100, 7):
                options = {
                    "ignore_index": ignored,
                    "label_smoothing": smoothing,
                    "reduction": reduction,
                }
                for model in (whole, cut):
                    model.zero_grad()
                logits = whole(x).flatten(0, 1)
                want = F.cross_entropy(
                    logits.float() if dtype == torch.bfloat16 else logits, y.flatten(), **options
                )
                here, alone = (
                    cross_entropy(cut(x), y, **options),
                    cross_entropy(whole(x), y, **options),
                )
                assert here.shape == alone.shape == (y.shape if reduction == "none" else ())
                torch.testing.assert_close(here.flatten(), want.flatten())
                torch.testing.assert_close(alone.flatten(), want.flatten())
                weigh = torch.linspace(0.5, 2, want.numel(), dtype=want.dtype)
                (want.flatten() * weigh).sum().backward()
                (here.flatten() * weigh).sum().backward()
                torch.testing.assert_close(
                    cut[0].weight.grad, shard_of(cut[0].weight).take_from(whole[0].weight.grad)
                )
                torch.testing.assert_close(
                    cut[0].bias.grad, shard_of(cut[0].bias).take_from(whole[0].bias.grad)
                )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_of_cut_logits_is_that_of_whole_ones(worlds: Any, dtype: torch.dtype) -> None:
    """
    Smoothing spreads over the whole vocabulary of 13 words, ignored targets count nothing, parts
    are uneven.

    Of bf16 the sums are in fp32, cut or not.
    """
    worlds(4).run(entropies, dtype)


def lost_mark() -> str:
    model = nn.Sequential(nn.Linear(6, 12))
    Strategy({"0": vocab("tp", gather=False)}).apply(model, axes_of(TP))
    with pytest.raises(UsageError) as caught:
        cross_entropy(model(torch.ones(2, 6)).float() * 1, torch.zeros(2, dtype=torch.long))
    return str(caught.value)


def test_a_part_of_logits_is_not_taken_for_the_whole(worlds: Any) -> None:
    told = worlds(4).run(lost_mark)[0]
    assert (
        told == "cross_entropy: logits of 3 classes can be full or one rank's shard: their mark is"
        " missing; pass the output of the head, not reshaped and not converted"
    )


def beyond() -> str:
    model = nn.Sequential(nn.Embedding(12, 6))
    Strategy({"0": vocab("tp")}).apply(model, axes_of(TP))
    try:
        model(torch.tensor([12]))
    except IndexError:
        return "IndexError"
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_an_id_beyond_the_vocabulary_is_an_error_as_ever(worlds: Any) -> None:
    """
    The rank with the last words fails; the others, which wait for it, end with it or after it.
    """
    found = worlds(4)
    found.start(beyond)
    answers = found.answers(until=3)
    found.broken = True  # ranks may wait for the one that has failed
    assert answers[3] == (True, "IndexError")
