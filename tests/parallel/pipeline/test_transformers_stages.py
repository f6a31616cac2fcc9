"""
Models of `transformers` in stages, as they are: small ones with random weights, against a run of
one process.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from pdrun.parallel.comm.mesh import solve_mesh
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.pipeline.pipeline import Pipeline
from tests.lib.tiers import thorough

pytestmark = pytest.mark.torch
pytest.importorskip("transformers", reason="transformers is not installed")

RANK_IMPORTS = [
    f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "qwen2")
]
WORDS, WIDTH = 61, 32
_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_TEXT: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "use_cache": False,
}


def _build(kind: str) -> torch.nn.Module:
    import transformers as t

    torch.manual_seed(0)
    made: torch.nn.Module
    if kind == "llama":
        made = t.LlamaForCausalLM(t.LlamaConfig(**_SIZES, **_TEXT, num_key_value_heads=2))
    elif kind == "qwen":
        config = t.Qwen2Config(**_SIZES, **_TEXT, num_key_value_heads=2, tie_word_embeddings=True)
        made = t.Qwen2ForCausalLM(config)
    elif kind == "bert":
        made = t.BertForMaskedLM(t.BertConfig(**_SIZES, max_position_embeddings=16))
    else:
        config = t.GPT2Config(
            n_layer=4,
            n_embd=WIDTH,
            n_head=4,
            vocab_size=WORDS,
            n_positions=16,
            embd_pdrop=0.1,
            resid_pdrop=0.1,
            attn_pdrop=0.1,
            **_TEXT,
        )
        made = t.GPT2LMHeadModel(config)
    return made


def _batch(step: int) -> dict[str, torch.Tensor]:
    """Return sequences of which some end early: 8 rows in the first step, 7 in the second."""
    rows, dice = 8 - step, torch.Generator().manual_seed(step)
    words = torch.randint(3, WORDS, (rows, 12), generator=dice)
    ends = torch.randint(6, 13, (rows, 1), generator=dice)
    mask = (torch.arange(12) < ends).long()
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def _loss(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def _hidden_loss(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Return the loss of the logits and of a layer's result, which is chosen by its index."""
    total, count = _loss(output, batch)
    return total + output.hidden_states[1].square().sum() + output.hidden_states[3].sum(), count


MEGATRON = {
    "model.embed_tokens.weight": L("tp", None),
    "model.layers.*.self_attn.[qkv]_proj.weight": L("tp", None),
    "model.layers.*.self_attn.o_proj.weight": L(None, "tp"),
    "model.layers.*.mlp.gate_proj.weight": L("tp", None),
    "model.layers.*.mlp.up_proj.weight": L("tp", None),
    "model.layers.*.mlp.down_proj.weight": L(None, "tp"),
}


def train(kind: str, stages: int, schedule: str, tensor: int = 1) -> list[tuple[float, float]]:
    """Return loss and norm of two steps."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    how: dict[str, Any] = {"accumulate": 4}
    if stages > 1:
        mesh = solve_mesh(stages * tensor, {"pp": stages, "tp": tensor})
        how = {"mesh": mesh, "pipeline": Pipeline(4, schedule=schedule)}
    is_hidden = kind.endswith("-hidden")
    if tensor > 1:
        sample = {key: value[:2] for key, value in _batch(0).items() if key != "labels"}
        how |= {"strategy": Operators(MEGATRON), "sample": sample}
    run = parallelize(
        _build(kind.removesuffix("-hidden")),
        lambda params: torch.optim.SGD(params, lr=0.1),
        _hidden_loss if is_hidden else _loss,
        norm=True,
        seed=3,
        forward=lambda model, batch: model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            output_hidden_states=is_hidden,
        ),
        **how,
    )
    return [(m.loss, m.grad_norm) for m in (run.step(_batch(step)) for step in range(2))]


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("llama", "zero-bubble-v"), ("gpt2", "1f1b"), ("qwen", "zero-bubble-v"), ("bert", "1f1b")]
    + [thorough("llama", "1f1b"), thorough("gpt2", "zero-bubble-v")]
    + [thorough("qwen", "1f1b"), thorough("bert", "zero-bubble-v")],
)
def test_models_as_they_are(worlds: Any, kind: str, schedule: str) -> None:
    want = worlds(1).run(train, kind, 1, "")[0]
    for found in worlds(2).run(train, kind, 2, schedule):
        np.testing.assert_allclose(found, want, rtol=2e-6)


def test_hidden_states_of_earlier_stages_keep_their_places(worlds: Any) -> None:
    want = worlds(1).run(train, "llama-hidden", 1, "")[0]
    for found in worlds(2).run(train, "llama-hidden", 2, "1f1b"):
        np.testing.assert_allclose(found, want, rtol=2e-6)


@pytest.mark.parametrize(
    ("kind", "schedule"), [thorough("llama", "zero-bubble-v"), ("qwen", "1f1b")]
)
def test_models_as_they_are_cut_by_operators_too(worlds: Any, kind: str, schedule: str) -> None:
    """Qwen's head is its embedding, which the first and the last stage hold."""
    want = worlds(1).run(train, kind, 1, "")[0]
    for found in worlds(4).run(train, kind, 2, schedule, 2):
        np.testing.assert_allclose(found, want, rtol=2e-6)
