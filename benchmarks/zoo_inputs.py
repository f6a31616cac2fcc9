"""
Models of transformers for `model_zoo.py` that take other inputs than one text or picture: series,
pictures with texts, sounds, boxes of a page; and hybrids of recurrent layers and attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zoo_models import (
    CLASSES,
    IMAGE_PIXELS,
    LENGTH,
    VOCABULARY,
    Architecture,
    Batch,
    class_loss,
    make_generator,
    own_loss,
    plain_text_batch,
    text_batch,
)
from zoo_transformers import (
    BART,
    DECODER,
    ENCODER,
    GROUPED,
    VISION,
    build_transformers,
    preset_styles,
)

Config = dict[str, Any]
PICTURE_TOKEN = 3
PICTURE_TOKENS = 4
SIDE: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_PIXELS,
    "patch_size": 16,
    "attention_dropout": 0.0,
}
"""The part of a model that takes pictures."""
SERIES: Config = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_cache": False,
}
MAMBA2: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
HYBRIDS: dict[str, Config] = {
    "jamba": {
        **GROUPED,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": {
        **GROUPED,
        **MAMBA2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
    "nemotron_h": {
        **GROUPED,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "zamba2": {
        **DECODER,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 4,
    },
    "llama4_text": {
        **GROUPED,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "attention_chunk_size": 8,
    },
    "gemma3n_text": {
        **GROUPED,
        "head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "xlstm": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "embedding_dim": 32,
        "num_hidden_layers": 2,
        "num_blocks": 2,
        "num_heads": 4,
        "chunk_size": 4,
        "use_cache": False,
    },
}
PAGES: Config = {
    **ENCODER,
    "num_labels": CLASSES,
    "input_size": IMAGE_PIXELS,
    "patch_size": 16,
    "coordinate_size": 6,
    "shape_size": 4,
    "max_2d_position_embeddings": 32,
}
TABLES: Config = {
    **ENCODER,
    "num_labels": CLASSES,
    "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4],
    "max_num_rows": 8,
    "max_num_columns": 8,
}
CHARACTERS: Config = {
    **ENCODER,
    "num_labels": CLASSES,
    "num_hash_functions": 2,
    "num_hash_buckets": 16,
    "local_transformer_stride": 4,
    "downsampling_rate": 4,
    "upsampling_kernel_size": 2,
}
SPECTROGRAMS: Config = {
    **VISION,
    "num_mel_bins": 16,
    "max_length": 32,
    "time_stride": 8,
    "frequency_stride": 8,
}
SPEECH: Config = {
    **BART,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "conv_kernel_sizes": [3, 3],
    "num_conv_layers": 2,
    "max_source_positions": 64,
    "max_target_positions": 32,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
WAVES: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _pictures(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, 3, IMAGE_PIXELS, IMAGE_PIXELS, generator=generator)


def _classes(rows: int, step: int) -> torch.Tensor:
    return torch.randint(CLASSES, (rows,), generator=make_generator(step))


def _series_batch(rows: int, step: int) -> Batch:
    dice = make_generator(step)
    return {
        "past_values": torch.randn(rows, 15, generator=dice),
        "past_time_features": torch.randn(rows, 15, 2, generator=dice),
        "past_observed_mask": torch.ones(rows, 15),
        "future_values": torch.randn(rows, 4, generator=dice),
        "future_time_features": torch.randn(rows, 4, 2, generator=dice),
    }


def _captioned_batch(rows: int, step: int) -> Batch:
    return {**text_batch(rows, step), "pixel_values": _pictures(rows, make_generator(step))}


def _inserted_batch(rows: int, step: int) -> Batch:
    """Return texts in which tokens stand for the parts of a picture."""
    batch = _captioned_batch(rows, step)
    ids = batch["input_ids"].clone()
    ids[:, :PICTURE_TOKENS] = PICTURE_TOKEN
    return {**batch, "input_ids": ids}


def _question_batch(rows: int, step: int) -> Batch:
    batch = _captioned_batch(rows, step)
    batch["pixel_mask"] = torch.ones(rows, IMAGE_PIXELS, IMAGE_PIXELS).long()
    batch["labels"] = torch.rand(rows, CLASSES, generator=make_generator(step))
    return batch


def _span_batch(rows: int, step: int) -> Batch:
    batch, dice = text_batch(rows, step), make_generator(step)
    del batch["labels"]
    ends = torch.randint(LENGTH // 2, (2, rows), generator=dice)
    return {**batch, "start_positions": ends[0], "end_positions": ends[1]}


def _text_class_batch(rows: int, step: int) -> Batch:
    return {**text_batch(rows, step), "labels": _classes(rows, step)}


def _table_batch(rows: int, step: int) -> Batch:
    batch = _text_class_batch(rows, step)
    return {**batch, "token_type_ids": torch.zeros(rows, LENGTH, 7).long()}


def _page_batch(rows: int, step: int) -> Batch:
    batch, dice = _captioned_batch(rows, step), make_generator(step)
    corners = torch.randint(16, (rows, LENGTH, 2), generator=dice)
    batch["bbox"] = torch.cat((corners, corners + 4), 2)
    batch["labels"] = torch.randint(CLASSES, (rows, LENGTH), generator=dice)
    return batch


def _labelled(*shape: int) -> Callable[[int, int], Batch]:
    """Return what makes a batch of random numbers and classes."""

    def make(rows: int, step: int) -> Batch:
        return torch.randn(rows, *shape, generator=make_generator(step)), _classes(rows, step)

    return make


def _transcribed(name: str, *shape: int) -> Callable[[int, int], Batch]:
    """Return what makes a batch of random numbers under a name, and labels of a text."""

    def make(rows: int, step: int) -> Batch:
        values = torch.randn(rows, *shape, generator=make_generator(step))
        return {name: values, "labels": text_batch(rows, step)["labels"]}

    return make


def _build_kind(kind: str, config: str, make: Callable[[Any], Config]) -> nn.Module:
    import transformers

    model = getattr(transformers, kind)(getattr(transformers, config)(**make(transformers)))
    assert isinstance(model, nn.Module)
    return model


def _llava_config(library: Any) -> Config:
    return {
        "vision_config": library.CLIPVisionConfig(**SIDE),
        "text_config": library.LlamaConfig(**GROUPED),
        "image_token_id": PICTURE_TOKEN,
        "vision_feature_layer": -1,
    }


def _blip_config(library: Any) -> Config:
    text = {**ENCODER, "encoder_hidden_size": 32, "is_decoder": True, "use_cache": False}
    return {
        "text_config": text,
        "vision_config": SIDE,
        "projection_dim": 16,
        "image_text_hidden_size": 16,
    }


def _captioner_config(library: Any) -> Config:
    decoder = {key: value for key, value in BART.items() if not key.startswith("encoder")}
    decoder |= {"is_decoder": True, "add_cross_attention": True, "cross_attention_hidden_size": 32}
    return {
        "encoder": library.ViTConfig(**VISION).to_dict(),
        "decoder": library.TrOCRConfig(**decoder).to_dict(),
        "decoder_start_token_id": 0,
        "pad_token_id": 2,
    }


def input_models() -> list[Architecture]:
    """Return the models; their names begin with ``i_``."""
    found = []

    def add(
        name: str,
        build: Callable[[], nn.Module],
        batch: Callable[[int, int], Batch],
        loss: Any = own_loss,
        traits: tuple[str, ...] = (),
    ) -> None:
        found.append(
            Architecture(
                f"i_{name}",
                "transformers",
                build,
                batch,
                loss,
                styles=preset_styles,
                traits=frozenset(traits),
            )
        )

    made = functools.partial(functools.partial, _build_kind)
    auto = functools.partial(functools.partial, build_transformers)
    for kind, config in HYBRIDS.items():
        batch = plain_text_batch if kind == "xlstm" else text_batch
        build = auto("AutoModelForCausalLM", kind, config)
        add(kind, build, batch, traits=("causal", "transformers"))
    for kind, more in (
        ("TimeSeriesTransformer", {}),
        ("Autoformer", {"moving_average": 3, "autocorrelation_factor": 1}),
    ):
        series: Callable[[Any], Config] = functools.partial(_series_config, more)
        add(kind.lower(), made(f"{kind}ForPrediction", f"{kind}Config", series), _series_batch)
    vilt = {**ENCODER, "image_size": 32, "patch_size": 16, "num_labels": CLASSES}
    add(
        "llava",
        made("LlavaForConditionalGeneration", "LlavaConfig", _llava_config),
        _inserted_batch,
    )
    add("blip", made("BlipForConditionalGeneration", "BlipConfig", _blip_config), _captioned_batch)
    add(
        "git",
        auto("AutoModelForCausalLM", "git", {**ENCODER, "vision_config": SIDE}),
        _captioned_batch,
    )
    add(
        "vilt",
        auto("AutoModelForVisualQuestionAnswering", "vilt", {**vilt, "max_image_length": -1}),
        _question_batch,
    )
    captioner = made("VisionEncoderDecoderModel", "VisionEncoderDecoderConfig", _captioner_config)
    add("trocr", captioner, _transcribed("pixel_values", 3, IMAGE_PIXELS, IMAGE_PIXELS))
    add("bert_span", auto("AutoModelForQuestionAnswering", "bert", ENCODER), _span_batch)
    add(
        "canine",
        auto("AutoModelForSequenceClassification", "canine", CHARACTERS),
        _text_class_batch,
    )
    add("tapas", auto("AutoModelForSequenceClassification", "tapas", TABLES), _table_batch)
    add("layoutlmv3", auto("AutoModelForTokenClassification", "layoutlmv3", PAGES), _page_batch)
    sounds = auto("AutoModelForAudioClassification", "audio-spectrogram-transformer", SPECTROGRAMS)
    add("ast", sounds, _labelled(32, 16), class_loss)
    video = {**VISION, "patch_size": 16, "num_frames": 4, "tubelet_size": 2}
    videos = auto("AutoModelForVideoClassification", "videomae", video)
    add("videomae", videos, _labelled(4, 3, IMAGE_PIXELS, IMAGE_PIXELS), class_loss)
    speech = auto("AutoModelForSpeechSeq2Seq", "speech_to_text", SPEECH)
    add("speech_to_text", speech, _transcribed("input_features", 24, 8))
    waves = auto("AutoModelForSpeechSeq2Seq", "moonshine", WAVES)
    add("moonshine", waves, _transcribed("input_values", 2400))
    return found


def _series_config(more: Config, library: Any) -> Config:
    return {**SERIES, **more}
