"""Tiny causal models of transformers, with weights of a seed, and without memory."""

from __future__ import annotations

from typing import Any

import torch

from pdrun.parallel.model.meta_init import empty_init

WORDS = 61
POSITIONS = 64
"""Ids and positions of the models."""
LLAMA_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHISPER_SIZES = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA_SIZES),
    "llama_one_kv": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA_SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**LLAMA_SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA_SIZES, "sliding_window": 5}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**LLAMA_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER_SIZES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2_SIZES),
}


def build_causal(kind: str, empty: bool = False, **sizes: Any) -> Any:
    """Return a model with large random weights, so that tokens differ; or one without memory."""
    transformers = __import__("transformers")
    config_name, model_name, usual = KINDS[kind]
    config = getattr(transformers, config_name)(**{**usual, **sizes})
    if empty:
        with empty_init():
            return getattr(transformers, model_name)(config)
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.15)
    return model.eval()


def prompts(rows: int = 3) -> list[list[int]]:
    """Return prompts of different lengths."""
    drawn = torch.randint(3, WORDS, (rows, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[: 8 - 2 * (row % 3)] for row, ids in enumerate(drawn)]


def encoder_inputs(kind: str, rows: int = 3) -> dict[str, Any] | None:
    """Return the inputs of a model's encoder, or None."""
    if kind != "whisper":
        return None
    features = torch.randn(rows, 8, 40, generator=torch.Generator().manual_seed(2))
    return {"input_features": features}


def prompts_for(kind: str, rows: int = 3) -> list[list[int]]:
    """Return prompts that a kind of model can have: those of a decoder have one length."""
    return [ids[:3] for ids in prompts(rows)] if kind == "whisper" else prompts(rows)
