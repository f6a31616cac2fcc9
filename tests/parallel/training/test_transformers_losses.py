"""Own losses of the transformers library: slices add up to the batch, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdrun.errors import UsageError
from pdrun.parallel.training.loss_check import find_own_loss
from tests.lib.tiers import thorough

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch

ROWS, LENGTH, WORDS = 6, 8, 24
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
OF_XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}
OF_XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2}
OF_T5 = {
    "decoder_start_token_id": 0,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}
OF_BART = {"d_model": 16, "decoder_start_token_id": 1} | {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
OF_MIXTRAL = {"num_local_experts": 2, "num_experts_per_tok": 1}


def make_model(name: str, more: dict[str, Any]) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**SIZES | more)).eval()


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Rows with other numbers of labels."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=dice)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, 2 + row :] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name.endswith("TokenClassification"):
        batch["labels"] = torch.where(labels > 0, labels % 2, labels)
    elif name.endswith("QuestionAnswering"):
        place = torch.arange(ROWS)
        batch = {"input_ids": ids, "start_positions": place, "end_positions": place + 1}
    elif name.endswith("SequenceClassification"):
        batch["labels"] = torch.arange(ROWS) % 2
    elif name == "ElectraForPreTraining":
        mask = (labels > 0).long()
        batch = {"input_ids": ids, "labels": ids % 2, "attention_mask": mask}
    elif name == "BertForPreTraining":
        batch["next_sentence_label"] = torch.arange(ROWS) % 2
    return batch


def combine_slices(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Return the loss of a batch from those of three slices of different sizes."""
    own = find_own_loss(model)
    assert own is not None
    total = weight = 0.0
    for rows in (slice(0, 1), slice(1, 3), slice(3, ROWS)):
        loss = model(**{name: tensor[rows] for name, tensor in batch.items()}).loss
        count = own.count_elements(loss, is_split=True)
        assert count is not None
        total += loss.item() * float(count)
        weight += float(count)
    return total / weight


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("XLNetLMHeadModel", OF_XLNET),  # not shifted, in spite of its name
        ("ElectraForPreTraining", {}),  # over words that are not padding
        thorough("XLMWithLMHeadModel", OF_XLM),
        thorough("FlaubertWithLMHeadModel", OF_XLM),
        thorough("GPT2LMHeadModel", OF_GPT2),
        thorough("LlamaForCausalLM", {}),
        thorough("MixtralForCausalLM", OF_MIXTRAL),
        thorough("T5ForConditionalGeneration", OF_T5),
        thorough("BartForConditionalGeneration", OF_BART),
        thorough("BertForMaskedLM", {}),
        thorough("BertForTokenClassification", {}),
        thorough("BertForQuestionAnswering", {}),
        thorough("BertForSequenceClassification", {}),
    ],
)
def test_slices_add_up_to_the_batch(name: str, more: dict[str, Any]) -> None:
    model, batch = make_model(name, more), batch_of(name)
    assert combine_slices(model, batch) == pytest.approx(model(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("BertForPreTraining", {}, "adds means over different numbers of elements"),
        thorough(
            "MixtralForCausalLM",
            OF_MIXTRAL | {"output_router_logits": True},
            "is a mean and another term",
        ),
    ],
)
def test_other_losses_are_refused(name: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"the own loss of {name} {why}"):
        combine_slices(make_model(name, more), batch_of(name))


def test_losses_between_rows_are_refused() -> None:
    with torch.device("meta"):
        model = transformers.CLIPModel(transformers.CLIPConfig())
    own = find_own_loss(model)
    assert own is not None
    with pytest.raises(UsageError, match="the own loss of CLIPModel compares each row"):
        own.count_elements(torch.zeros(()), is_split=True)
