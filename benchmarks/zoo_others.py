"""
More transformers models of `model_zoo.py`, by model type: families that others bring.

Router noise and dropped layers are off: torch and pdrun draw other numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from zoo_models import (
    CLASSES,
    VOCABULARY,
    Architecture,
    class_loss,
    image_batch,
    make_generator,
    own_loss,
    plain_text_batch,
    text_batch,
)
from zoo_transformers import (
    BART,
    DECODER,
    DECODERS,
    ENCODER,
    GPT2,
    GROUPED,
    IMAGE_CLASSIFIERS,
    T5,
    VISION,
    build_transformers,
    preset_styles,
    speech_batch,
)

Table = dict[str, dict[str, Any]]

CAUSAL: Table = {
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "cohere2": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "nemotron": GROUPED,
    "persimmon": DECODER,
    "glm": {**GROUPED, "head_dim": 8},
    "mpt": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 32,
        "expansion_ratio": 2,
        "use_cache": False,
    },
    "codegen": {**GPT2, "rotary_dim": 4, "n_ctx": 32},
    "gpt_bigcode": {**GPT2, "multi_query": True},
    "biogpt": {
        **DECODER,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layerdrop": 0.0,
        "activation_dropout": 0.0,
    },
    "xglm": {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
        "use_cache": False,
        "pad_token_id": 2,
    },
    "olmo3": {**GROUPED, "sliding_window": 8},
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "expand": 2,
    },
    "falcon_mamba": DECODERS["mamba"],
    "rwkv": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
        "context_length": 32,
        "use_cache": False,
    },
    "recurrent_gemma": {
        **DECODER,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "head_dim": 8,
    },
    "phimoe": {
        **GROUPED,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {**GROUPED, "sliding_window": 8, "sliding_window_pattern": 2},
    "ernie4_5": {**GROUPED, "head_dim": 8},
    "seed_oss": {**GROUPED, "head_dim": 8, "residual_dropout": 0.0},
    "arcee": GROUPED,
    "helium": {**GROUPED, "head_dim": 8},
    "bitnet": GROUPED,
    "hunyuan_v1_dense": {**GROUPED, "head_dim": 8},
    "ctrl": {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": 32,
        "dff": 48,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "use_cache": False,
    },
    "openai-gpt": {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "xlnet": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_layer": 2,
        "n_head": 4,
        "d_inner": 48,
        "dropout": 0.0,
    },
    "qwen3_next": {
        **GROUPED,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "bamba": {
        **GROUPED,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
}
MASKED: Table = {
    "longformer": {**ENCODER, "attention_window": 4},
    "big_bird": {**ENCODER, "attention_type": "original_full"},
    "roformer": {**ENCODER, "embedding_size": 32, "rotary_value": False},
    "fnet": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 32,
        "pad_token_id": 2,
    },
    "mobilebert": {
        **ENCODER,
        "embedding_size": 16,
        "intra_bottleneck_size": 16,
        "num_feedforward_networks": 2,
    },
    "mpnet": ENCODER,
    "squeezebert": {**ENCODER, "embedding_size": 32},
    "convbert": {**ENCODER, "embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3},
    "rembert": {**ENCODER, "input_embedding_size": 16, "output_embedding_size": 32},
    "esm": {
        **ENCODER,
        "position_embedding_type": "rotary",
        "token_dropout": False,
        "mask_token_id": 3,
    },
    "deberta": {
        **ENCODER,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 16,
    },
    "megatron-bert": ENCODER,
    "camembert": ENCODER,
    "data2vec-text": ENCODER,
    "ibert": ENCODER,
    "layoutlm": ENCODER,
    "funnel": {
        "vocab_size": VOCABULARY,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 48,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_position_embeddings": 32,
    },
    "xlm": {
        "vocab_size": VOCABULARY,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 32,
        "n_langs": 1,
    },
    "flaubert": {
        "vocab_size": VOCABULARY,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 32,
    },
    "perceiver": {
        "vocab_size": VOCABULARY,
        "num_latents": 6,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 12,
    },
    "yoso": {**ENCODER, "num_hash": 4, "use_expectation": True},
    "xmod": {**ENCODER, "languages": ["en"], "default_language": "en"},
    "luke": {**ENCODER, "entity_vocab_size": 8, "entity_emb_size": 16},
    "ernie": ENCODER,
}
SEQUENCES: Table = {
    "led": {
        **BART,
        "attention_window": 4,
        "max_encoder_position_embeddings": 32,
        "max_decoder_position_embeddings": 32,
    },
    "blenderbot": BART,
    "blenderbot-small": BART,
    "marian": {**BART, "pad_token_id": 2},
    "m2m_100": {**BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "longt5": {**T5, "local_radius": 3, "encoder_attention_type": "local"},
    "switch_transformers": {
        **T5,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
        "expert_capacity": 64,
    },
    "umt5": T5,
    "plbart": BART,
    "prophetnet": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "use_cache": False,
        "pad_token_id": 2,
        "decoder_start_token_id": 0,
        "ngram": 2,
        "disable_ngram_loss": True,
    },
}
IMAGES: Table = {
    "beit": {**VISION, "drop_path_rate": 0.0},
    "data2vec-vision": {**VISION, "drop_path_rate": 0.0},
    "convnextv2": IMAGE_CLASSIFIERS["convnext"],
    "poolformer": {
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "num_encoder_blocks": 2,
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
    "pvt": {
        "image_size": 32,
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sequence_reduction_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "focalnet": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
    "swinv2": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
    "hiera": {
        "image_size": [32, 32],
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "embed_dim_multiplier": 2.0,
        "num_query_pool": 1,
        "query_stride": [2, 2],
        "masked_unit_size": [2, 2],
        "masked_unit_attention": [True, False],
        "num_labels": CLASSES,
        "drop_path_rate": 0.0,
    },
    "vit_msn": VISION,
    "dinov2_with_registers": {**VISION, "mlp_ratio": 2},
}
NORMALISED_IMAGES: Table = {
    "resnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "num_labels": CLASSES,
    },
    "regnet": {
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "groups_width": 8,
        "num_labels": CLASSES,
    },
    "mobilenet_v2": {
        "image_size": 32,
        "depth_multiplier": 0.35,
        "num_labels": CLASSES,
        "classifier_dropout_prob": 0.0,
    },
    "mobilevit": {
        "image_size": 32,
        "hidden_sizes": [16, 16, 16],
        "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
        "num_attention_heads": 2,
        "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    },
}
SOUND: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
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
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
SOUNDS: Table = {
    "hubert": SOUND,
    "wavlm": SOUND,
    "unispeech-sat": SOUND,
    "data2vec-audio": {**SOUND, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    "sew": {**SOUND, "squeeze_factor": 2},
}

WITHOUT_MASK = frozenset(("mamba2", "falcon_mamba", "rwkv"))
FORECASTS: Table = {
    "PatchTSTForPrediction": {
        "num_input_channels": 3,
        "context_length": 16,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "ffn_dim": 32,
        "prediction_length": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "norm_type": "layernorm",
        "loss": "mse",
    },
    "PatchTSMixerForPrediction": {
        "num_input_channels": 3,
        "context_length": 16,
        "patch_length": 4,
        "patch_stride": 4,
        "d_model": 8,
        "num_layers": 2,
        "prediction_length": 4,
        "dropout": 0.0,
        "head_dropout": 0.0,
        "loss": "mse",
    },
}


def _forecast_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    generator = make_generator(step)
    past, future = (torch.randn(rows, length, 3, generator=generator) for length in (16, 4))
    return {"past_values": past, "future_values": future}


def _build_forecast(kind: str, config: dict[str, Any]) -> Any:
    import transformers

    made = getattr(transformers, kind.replace("ForPrediction", "Config"))(**config)
    return getattr(transformers, kind)(made)


def other_models() -> list[Architecture]:
    """Return the models; their names begin with ``x_``."""
    found = []
    plain = {kind: CAUSAL[kind] for kind in WITHOUT_MASK}
    masked = {kind: config for kind, config in CAUSAL.items() if kind not in WITHOUT_MASK}
    causal = frozenset(("causal", "transformers"))
    tables: list[tuple[str, Table, Any, Any, frozenset[str]]] = [
        ("AutoModelForCausalLM", plain, plain_text_batch, own_loss, causal),
        ("AutoModelForCausalLM", masked, text_batch, own_loss, causal),
        ("AutoModelForMaskedLM", MASKED, text_batch, own_loss, frozenset()),
        ("AutoModelForSeq2SeqLM", SEQUENCES, text_batch, own_loss, frozenset()),
        ("AutoModelForImageClassification", IMAGES, image_batch, class_loss, frozenset()),
        (
            "AutoModelForImageClassification",
            NORMALISED_IMAGES,
            image_batch,
            class_loss,
            frozenset(("batchnorm",)),
        ),
        ("AutoModelForAudioClassification", SOUNDS, speech_batch, class_loss, frozenset()),
    ]
    for auto, table, batch, loss, traits in tables:
        for kind, config in table.items():
            build = functools.partial(build_transformers, auto, kind, config)
            name = f"x_{kind.replace('-', '_')}"
            found.append(
                Architecture(
                    name, "transformers", build, batch, loss, styles=preset_styles, traits=traits
                )
            )
    for kind, config in FORECASTS.items():
        build = functools.partial(_build_forecast, kind, config)
        name = f"x_{kind.removesuffix('ForPrediction').lower()}"
        found.append(Architecture(name, "transformers", build, _forecast_batch, own_loss))
    return found
