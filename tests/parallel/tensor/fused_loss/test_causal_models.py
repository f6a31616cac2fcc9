"""Models of the transformers library with head and loss in one function."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pdrun
from pdrun.parallel.tensor.fused_loss.causal_models import DeferredLogits

pytestmark = pytest.mark.torch


def make(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 37,
        "max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | options))


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(37, (4, 9), generator=draw)
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_stay(tied: bool) -> None:
    model = make(tie_word_embeddings=tied)
    other = pdrun.fuse_head_loss(copy.deepcopy(model))
    other = copy.deepcopy(pdrun.fuse_head_loss(other))  # twice, and in a copy
    ids, labels = drawn()
    for options in ({}, {"num_items_in_batch": 7}):
        want, found = (m(input_ids=ids, labels=labels, **options) for m in (model, other))
        assert isinstance(found.logits, DeferredLogits)
        torch.testing.assert_close(found.loss, want.loss)
        for m, out in ((model, want), (other, found)):
            m.zero_grad()
            out.loss.backward()
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(two.grad, one.grad, msg=name)


def test_logits_are_there_if_they_are_read() -> None:
    model = make()
    ids, labels = drawn()
    want = model(input_ids=ids, labels=labels).logits
    fused = pdrun.fuse_head_loss(model)
    logits = fused(ids, None, None, None, None, labels).logits  # positional
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, logits.size(-1)) == (want.shape, want.dtype, 37)
    assert logits._computed is None
    torch.testing.assert_close(logits.float()[:, -1], want[:, -1])
    assert logits.argmax(-1).equal(want.argmax(-1))
    assert (logits * 2).requires_grad
    plain = fused(input_ids=ids).logits  # without labels
    assert type(plain) is torch.Tensor and plain.equal(want)


def test_a_model_that_changes_its_logits_first() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(1)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=37,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
        )
    )
    ids, labels = drawn()
    want = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(pdrun.fuse_head_loss(model)(input_ids=ids, labels=labels).loss, want)


def train(fused: bool, preset: bool = False, **options: Any) -> list[float]:
    model = make()
    if fused:
        pdrun.fuse_head_loss(model)
    ids, _ = drawn()
    if preset:
        options |= {"mesh": pdrun.mesh(tp=2), "strategy": pdrun.strategy_for(model)}
    run = pdrun.parallelize(
        model,
        lambda params: torch.optim.SGD(params, lr=0.5),
        lambda output, batch: output.loss,
        **options,
    )
    batch = {"input_ids": ids, "labels": ids}
    found = [run.step(batch).loss for _ in range(3)]
    assert run.evaluate(one for one in [batch]).loss < found[0]
    return found


@pytest.mark.parametrize("options", [{"optimizer_level": 3}, {"preset": True}])
def test_runs_are_those_of_one_process(worlds: Any, options: Any) -> None:
    want = worlds(1).run(train, False)[0]
    for found in worlds(2).run(train, True, **options):
        assert found == pytest.approx(want, rel=2e-6)
    assert want[2] < want[0]


def test_refusals() -> None:
    with pytest.raises(pdrun.UsageError, match="Linear has no linear head"):
        pdrun.fuse_head_loss(nn.Linear(2, 2))
    from transformers import BertConfig, BertForMaskedLM

    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(vocab_size=37, intermediate_size=16, **sizes))
    with pytest.raises(pdrun.UsageError, match="the loss of BertForMaskedLM is"):
        pdrun.fuse_head_loss(bert)
