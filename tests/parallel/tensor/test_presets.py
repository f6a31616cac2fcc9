"""
Models of the transformers library, cut by the strategies that are known for them, equal the whole
ones.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import nn

from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.tensor import cross_entropy, strategy_for
from tests.lib.decoder_model import compare
from tests.lib.tiers import thorough

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("transformers", reason="the transformers library is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"
RANK_IMPORTS = [
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen3")),
]
SIZES = {"vocab_size": 37, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
LLAMA = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 4},
    "llama-two": {
        **LLAMA,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "qwen3": {**LLAMA, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {
        **SIZES,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
}
WIDE = {"vocab_size": 37, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT = {
    "n_embd": 32,
    "n_head": 8,
    "n_layer": 2,
    "n_positions": 16,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "phi3": {**LLAMA, **WIDE, "num_key_value_heads": 4, "resid_pdrop": 0.0},
    "gpt_neox": {**LLAMA, **WIDE, "hidden_dropout": 0.0},
    "falcon": {**LLAMA, **WIDE, "alibi": True},
    "bloom": {**WIDE, "hidden_size": 32, "n_layer": 2, "n_head": 8},
    "persimmon": {**LLAMA, **WIDE},
    "mpt": {**WIDE, "d_model": 32, "n_heads": 8, "n_layers": 2, "max_seq_len": 16},
    "gpt_bigcode": {**WIDE, **GPT, "attn_pdrop": 0.0},
    "ctrl": {**WIDE, **GPT, "dff": 48},
    "opt": {**LLAMA, **WIDE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "olmo": {**LLAMA, "num_key_value_heads": 4},
    "mixtral": {**LLAMA, "num_key_value_heads": 4, "num_local_experts": 4},
    "deepseek_v2": {**LLAMA, **LATENT},
    "gpt_oss": {**LLAMA, "num_key_value_heads": 4, "head_dim": 8, "num_local_experts": 4},
    "albert": {
        **LLAMA,
        **WIDE,
        "embedding_size": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "modernbert": {**LLAMA, **WIDE, "cls_token_id": 0, "sep_token_id": 1},
}
"""Those that differ in kind: only in the thorough run. Olmo has a plan in transformers only."""
MASKED = {"albert", "modernbert"}
KINDS |= OTHERS


@functools.cache
def load() -> None:
    """Import what the models need, once a rank."""
    for kind in KINDS.keys() - OTHERS.keys():
        build(kind)


@pytest.fixture
def four(worlds: Any) -> Any:
    """Four ranks that have loaded the library, which takes its time on a busy machine."""
    found = worlds(4)
    found.start(load)
    assert all(worked for worked, _ in found.answers(170.0))
    return found


def build(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split("-")[0], **KINDS[kind])
    more = {}
    if hasattr(config, "num_local_experts"):
        more["experts_implementation"] = "eager"  # others have no fp64
    auto = AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM
    model = auto.from_config(config, **more).double().train()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(
                torch.randn_like(param) * 0.1
            )  # norms and biases start at one and zero, and all weights small
    return model  # type: ignore[no-any-return]


def logits_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(input_ids=ids[:, :-1]).logits, ids[:, 1:])


def own_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    part = ids[:, :-1].contiguous()
    return model(input_ids=part, labels=part).loss  # type: ignore[no-any-return]


def same(kind: str, sequence: bool, gather: bool) -> dict[str, int]:
    model = build(kind)
    ids = torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(1))
    how = strategy_for(model, sequence=sequence, gather=gather)
    # norms of transformers compute in fp32 whatever they are given
    _, axes = compare(
        model, how, Grid(("tp",), (4,)), ids, own_loss if gather else logits_loss, exact=False
    )
    return {name: count.calls for (name, _), count in axes.counts.items()}


WAYS = [
    (kind, way) for kind in sorted(KINDS.keys() - OTHERS.keys()) for way in ("whole", "sequence")
]
DROPPED = [("llama-two", "sequence"), ("gpt2", "whole")]
"""Whose way the default run has in `test_dropout_of_transformers_is_that_of_one_process`."""


@pytest.mark.parametrize(
    ("kind", "way"), [thorough(*case) if case in DROPPED else case for case in WAYS]
)
def test_a_cut_model_of_transformers_equals_the_whole(four: Any, kind: str, way: str) -> None:
    sequence = way == "sequence"
    counts = four.run(same, kind, sequence, not sequence)[0]
    layers = 2 * 4
    if sequence:  # four each in a layer, besides embedding, head, and where the sequence is cut
        assert layers <= counts["all_gather"] <= layers + 4
        assert layers <= counts["reduce_scatter"] <= layers + 1
    else:
        assert counts["all_reduce"] == layers + 2


def equals_whole(kind: str) -> None:
    model = build(kind)
    ids = torch.randint(3, 37, (4, 9), generator=torch.Generator().manual_seed(1))
    # rotary positions and alibi are in fp32
    compare(model, strategy_for(model), Grid(("tp",), (2,)), ids, own_loss, exact=False)


@pytest.mark.parametrize("kind", [thorough(kind) for kind in OTHERS])
def test_other_kinds_of_attention_equal_the_whole(worlds: Any, kind: str) -> None:
    worlds(2).run(equals_whole, kind, bound=170.0)


def dropped(kind: str, sequence: bool) -> str:
    from pdrun.parallel.comm import mesh
    from pdrun.parallel.parallelize import parallelize

    model = build(kind).float()
    model.config.attention_dropout = 0.2
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    how = strategy_for(model, sequence=sequence)
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, ids: (output.sum(), output.numel()),
        forward=lambda model, ids: _losses(model, ids),
        mesh=mesh.make_mesh(dp=2, tp=2),
        strategy=how,
        recompute="full",
        optimizer_level=2,
    )
    ids = torch.randint(37, (6, 9), generator=torch.Generator().manual_seed(1))
    told = str(run.verify([ids]))
    assert run.state.rng.is_used
    return told


def _losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits, ids[:, 1:], reduction="none")


@pytest.mark.parametrize(
    ("kind", "way"),
    [*DROPPED, thorough("llama-two", "whole"), thorough("gpt2", "sequence")],
)
def test_dropout_of_transformers_is_that_of_one_process(four: Any, kind: str, way: str) -> None:
    """
    In attention, between layers and after the embedding, recomputed in the backward pass, with rows
    cut as well.
    """
    assert "gradients within" in four.run(dropped, kind, way == "sequence")[0]


def generated() -> None:
    from pdrun.parallel.layouts.grid import Grid
    from tests.lib.decoder_model import axes_of

    model, whole = build("llama").eval(), build("llama").eval()
    strategy_for(model).apply(model, axes_of(Grid(("tp",), (4,))))
    ids = torch.tensor([[3, 5, 7]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert model.generate(ids, **options).tolist() == whole.generate(ids, **options).tolist()


def test_a_cut_model_generates_what_the_whole_one_does(four: Any) -> None:
    """Its cache holds this rank's heads."""
    four.run(generated)
