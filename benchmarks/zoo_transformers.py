"""The transformers models of `model_zoo.py`, by model type: small configurations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from zoo_models import (
    CLASSES,
    IMAGE_PIXELS,
    LENGTH,
    VOCABULARY,
    Architecture,
    class_loss,
    image_batch,
    make_generator,
    own_loss,
    plain_text_batch,
    text_batch,
)

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "use_cache": False,
    "attention_dropout": 0.0,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
GPT2 = {
    **{key: DECODER[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "use_cache")},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "phi": {**DECODER, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2": GPT2,
    "gpt_neox": {**DECODER, "hidden_dropout": 0.0},
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_neo": {
        **{key: value for key, value in DECODER.items() if "num_" not in key},
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
    },
    "falcon": {**DECODER, "hidden_dropout": 0.0, "alibi": False},
    "falcon-new": {
        **DECODER,
        "hidden_dropout": 0.0,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "bloom": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    "opt": {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "granite": GROUPED,
    "glm4": {**GROUPED, "head_dim": 8},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 8},
    "olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**DECODER, **LATENT},
    "deepseek_v3": {**DECODER, **LATENT},
    "gpt_oss": {
        **GROUPED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "lfm2": {**GROUPED, "full_attn_idxs": [1], "block_multiple_of": 8},
}
NO_MASK = frozenset(("mamba",))

ENCODER = {
    **{key: DECODER[key] for key in DECODER if key not in ("use_cache", "attention_dropout")},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "electra": {**ENCODER, "embedding_size": 32},
    "albert": {**ENCODER, "embedding_size": 16},
    "deberta-v2": {
        **ENCODER,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "modernbert": {
        **DECODER,
        "cls_token_id": 0,
        "sep_token_id": 1,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
    },
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
    "pad_token_id": 2,
    "eos_token_id": 1,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_PIXELS,
    "patch_size": 8,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGE_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": VISION,
    "deit": {**VISION, "architectures": ["DeiTForImageClassification"]},
    "dinov2": {**VISION, "mlp_ratio": 2},
    "swin": {
        "image_size": IMAGE_PIXELS,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
    "convnext": {
        "image_size": IMAGE_PIXELS,
        "num_stages": 2,
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_labels": CLASSES,
    },
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
        "drop_path_rate": 0.0,
    },
}


def build_transformers(auto: str, kind: str, config: dict[str, Any]) -> nn.Module:
    """Return a model of transformers, by the name of its Auto class and model type."""
    import transformers

    known = transformers.AutoConfig.for_model(kind.removesuffix("-new"), **config)
    model = getattr(transformers, auto).from_config(known)
    assert isinstance(model, nn.Module)
    return model


def preset_styles(model: nn.Module) -> Any:
    """Return pdrun's module styles for a model of transformers."""
    import pdrun

    return pdrun.strategy_for(model)


def _whisper_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    labels = text_batch(rows, step)["labels"]
    return {
        "input_features": torch.randn(rows, 8, 2 * LENGTH, generator=make_generator(step)),
        "labels": labels,
    }


def speech_batch(rows: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sounds and classes."""
    generator = make_generator(step)
    sound = torch.randn(rows, 800, generator=generator)
    return sound, torch.randint(CLASSES, (rows,), generator=generator)


def _named(kind: str) -> str:
    return f"{kind.replace('-', '_')}"


def transformers_models() -> list[Architecture]:
    """Return the models of the transformers library."""
    found = []
    for kind, config in DECODERS.items():
        found.append(
            Architecture(
                _named(kind),
                "transformers",
                functools.partial(build_transformers, "AutoModelForCausalLM", kind, config),
                plain_text_batch if kind in NO_MASK else text_batch,
                own_loss,
                styles=preset_styles,
                traits=frozenset(("causal", "transformers")),
            )
        )
    for auto, table in (
        ("AutoModelForMaskedLM", ENCODERS),
        ("AutoModelForSeq2SeqLM", ENCODER_DECODERS),
    ):
        for kind, config in table.items():
            build = functools.partial(build_transformers, auto, kind, config)
            found.append(
                Architecture(
                    _named(kind), "transformers", build, text_batch, own_loss, styles=preset_styles
                )
            )
    for kind, config in IMAGE_CLASSIFIERS.items():
        build = functools.partial(
            build_transformers, "AutoModelForImageClassification", kind, config
        )
        found.append(
            Architecture(
                _named(kind), "transformers", build, image_batch, class_loss, styles=preset_styles
            )
        )
    whisper = {
        **{key: BART[key] for key in BART if key != "max_position_embeddings"},
        "num_mel_bins": 8,
        "max_source_positions": LENGTH,
        "max_target_positions": LENGTH,
    }
    build = functools.partial(build_transformers, "AutoModelForSpeechSeq2Seq", "whisper", whisper)
    found.append(
        Architecture(
            "whisper", "transformers", build, _whisper_batch, own_loss, styles=preset_styles
        )
    )
    sound = {
        **{key: ENCODER[key] for key in ("hidden_size", "num_hidden_layers")},
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": [16, 16],
        "conv_stride": [5, 4],
        "conv_kernel": [10, 8],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_labels": CLASSES,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
        **dict.fromkeys(
            (
                "hidden_dropout",
                "attention_dropout",
                "activation_dropout",
                "feat_proj_dropout",
                "final_dropout",
            ),
            0.0,
        ),
    }
    build = functools.partial(
        build_transformers, "AutoModelForAudioClassification", "wav2vec2", sound
    )
    found.append(
        Architecture(
            "wav2vec2", "transformers", build, speech_batch, class_loss, styles=preset_styles
        )
    )
    return found
