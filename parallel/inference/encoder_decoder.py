"""
Generation by models with an encoder and a decoder (whisper, T5): the encoder computes once, and the
decoder one token at a time, with its cache and that of the encoder's output.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.inference.prompts import Prompts
from pdrun.parallel.inference.sampling import GENERATE

EncoderInputs = dict[str, torch.Tensor]


class EncoderDecoderSession:
    """The decoder's prompts have one length: its positions have no padding."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
    ) -> None:
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        self.model = model
        self._ids = prompts.left_padded(device)
        config: Any = model.config
        self.cache: Any = StaticCache(config=config, max_cache_len=places)
        both = EncoderDecoderCache(self.cache, DynamicCache())
        encoder: Any = model.get_encoder()
        dtype = next(model.parameters()).dtype
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        self._fixed: dict[str, Any] = {"encoder_outputs": encoder(**moved), "use_cache": True}
        names = inspect.signature(model.forward).parameters
        self._fixed["cache" if "cache" in names else "past_key_values"] = both
        if "attention_mask" in moved:
            self._fixed["attention_mask"] = moved["attention_mask"]

    def start(self) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` after the prompts."""
        return self._compute(self._ids)

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token ``[rows]``."""
        return self._compute(tokens[:, None])

    def _compute(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(decoder_input_ids=ids, **self._fixed).logits
        return logits[:, -1]


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a model has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def parse_inputs(model: nn.Module, value: Any, prompts: Prompts) -> EncoderInputs:
    """
    Return the inputs of the encoder, one row per prompt.

    Raises:
        UsageError: they are missing, unknown, of another number of rows, or the model has no
            encoder; or the prompts have several lengths.
    """
    kind = type(model).__name__
    if not is_encoder_decoder(model):
        if value is not None:
            raise UsageError(f"{kind} has no encoder, so inputs= has no use", where=GENERATE)
        return {}
    main = str(getattr(model, "main_input_name", "input_ids"))
    hint = f"inputs={{'{main}': tensor}}, one row for each prompt"
    if value is None:
        raise UsageError(f"{kind} has an encoder and needs inputs=", where=GENERATE, hint=hint)
    if not isinstance(value, Mapping) or not all(
        isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in value.values()
    ):
        raise UsageError("inputs must be tensors by name", where=GENERATE, hint=hint)
    found: EncoderInputs = {str(name): tensor for name, tensor in value.items()}
    encoder: Any = model.get_encoder()
    known = set(inspect.signature(encoder.forward).parameters)
    unknown = sorted(set(found) - known)
    if unknown or main not in found:
        what = f"inputs has the unknown name {unknown[0]}" if unknown else f"inputs has no {main}"
        raise UsageError(what, where=GENERATE, hint=hint)
    for name, tensor in found.items():
        if len(tensor) != len(prompts.ids):
            what = f"inputs[{name!r}] has {len(tensor)} rows for {len(prompts.ids)} prompts"
            raise UsageError(what, where=GENERATE, hint=hint)
    if prompts.shortest != prompts.width:
        what = f"prompts have {prompts.shortest} to {prompts.width} tokens"
        hint = f"{kind} needs prompts of one length: generate in several calls"
        raise UsageError(what, where=GENERATE, hint=hint)
    return found


def probe_inputs(model: nn.Module) -> EncoderInputs:
    """Return inputs of one row with which a model can be tried; empty without an encoder."""
    if not is_encoder_decoder(model):
        return {}
    config: Any = model.config
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        return {"input_ids": torch.zeros(1, 1, dtype=torch.int64)}
    # two frames are one position, behind a convolution with a stride of two
    return {"input_features": torch.zeros(1, bins, 2 * config.max_source_positions)}


def rows_of_inputs(inputs: EncoderInputs, rows: range) -> EncoderInputs:
    """Return the inputs of some rows."""
    return {name: tensor[rows.start : rows.stop] for name, tensor in inputs.items()}


def digest_inputs(inputs: EncoderInputs) -> str:
    """Return a text that differs if the inputs do."""
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()[:16]
