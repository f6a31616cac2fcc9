"""
Models of the transformers library over sharded sequences, by stand-ins with the same traits: masks
that the library makes, positions counted from 0, attention that is written out, position mixers.
"""

from __future__ import annotations

import sys
import types
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.context_parallel import library_models
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.context_parallel.mixers import check_mixers
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch
LENGTH, WIDTH, WORDS = 10, 16, 32


def _preprocess_mask_arguments(
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    position_ids: torch.Tensor | None,
    layer_idx: int | None,
    encoder_hidden_states: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """What transformers.masking_utils does: lengths, and sequences packed into a row."""
    packed = None
    if attention_mask is None and position_ids is not None:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        found = (steps != 1).cumsum(-1)
        packed = None if bool((found[:, -1] == 0).all()) else found
    length = inputs_embeds.shape[1]
    return False, attention_mask, packed, length, length, 0, 0


def make_mask(embeds: torch.Tensor, padding: Any, positions: Any, window: int) -> Any:
    """Return a causal mask with a window, or None for a plain causal one."""
    library = sys.modules[library_models.MASKS_MODULE]
    _, padding, packed, rows, columns, _, _ = library._preprocess_mask_arguments(
        None, embeds, padding, None, positions, None
    )
    if packed is None and window >= columns and (padding is None or bool(padding.all())):
        return None
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    mask = ((column <= row) & (column > row - window))[None, None]
    if padding is not None:
        mask = mask & (padding[:, None, None, :] > 0)
    return mask.expand(embeds.shape[0], 1, rows, columns)


class Config(types.SimpleNamespace):
    """What the library calls a config."""


class Decoder(nn.Module):
    """A block of attention that counts its positions from 0 if it gets none."""

    _supports_sdpa = True

    def __init__(self, window: int = 100, kind: str = "eager") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config(_attn_implementation=kind)
        self.window = window
        self.emb, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def set_attn_implementation(self, kind: str) -> None:
        self.config._attn_implementation = kind

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None
    ) -> torch.Tensor:
        embeds = self.emb(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        mask = make_mask(embeds, attention_mask, position_ids, self.window)
        x = embeds + self.places(position_ids)
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.config._attn_implementation == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            full = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
            out = scores.masked_fill(~full, float("-inf")).softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))


class Wrapped(nn.Module):
    """A model around it, as a head for a loss: positions are passed on as None."""

    def __init__(self, window: int = 100) -> None:
        super().__init__()
        self.model = Decoder(window)

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return self.model(input_ids, attention_mask, position_ids)


class Offset(Decoder):
    """Numbers positions in its own way, which cannot be seen."""

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None
    ) -> torch.Tensor:
        ids = input_ids.ne(0).cumsum(1) + 1 if position_ids is None else position_ids
        return super().forward(input_ids, attention_mask, ids)


class Fixed(Decoder):
    """Has no other form of attention."""

    _supports_sdpa = False


def loss(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = batch["labels"].flatten()
    total = F.cross_entropy(out.flatten(0, 1), chosen, ignore_index=-100, reduction="sum")
    return total, (chosen != -100).sum()


def batch(rows: int, keys: str) -> Any:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, WORDS, (rows, LENGTH), generator=generator)
    padding = torch.ones_like(ids)
    if "short" in keys:
        padding[0, 6:] = 0
    found = {"input_ids": ids, "labels": ids.roll(-1, 1).masked_fill(padding == 0, -100)}
    if "mask" in keys:
        found["attention_mask"] = padding
    if "positions" in keys:
        found["position_ids"] = torch.arange(LENGTH).expand(rows, -1).clone()
    if "restart" in keys:
        found["position_ids"] = (torch.arange(LENGTH) % 5).expand(rows, -1).clone()
    return UserDict(found) if "user" in keys else found


@contextmanager
def stand_in_library() -> Iterator[None]:
    """Replace the library's module of masks, which this process may have imported."""
    name = library_models.MASKS_MODULE
    real = sys.modules.get(name)
    stand_in: Any = types.ModuleType(name)
    stand_in._preprocess_mask_arguments = _preprocess_mask_arguments
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
        if real is not None:
            sys.modules[name] = real


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.5)


def trained(kind: type[nn.Module], keys: str, options: dict[str, Any], **args: Any) -> Any:
    """Return the largest differences of losses and of weights from plain torch."""
    with stand_in_library():
        model, plain = kind(**args), kind(**args)
        run = parallelize(
            model, sgd, loss, mesh=mesh.make_mesh(cp=2), context=ContextParallel(**options)
        )
        run.verify([batch(3, keys)])
        optimizer = sgd(plain.parameters())
        differences = []
        for rows in (4, 3, 2):
            given = batch(rows, keys)
            inputs = {key: value for key, value in given.items() if key != "labels"}
            total, count = loss(plain(**inputs), given)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            differences.append(abs(run.step(given).loss - float((total / count).detach())))
        weights = run.full_weights()
        worst = max(float((weights[k] - v).abs().max()) for k, v in plain.state_dict().items())
        return max(differences), worst


@pytest.mark.parametrize(
    ("kind", "keys", "options", "args"),
    [
        (Decoder, "", {}, {}),
        (Wrapped, "mask short user", {}, {}),
        (Decoder, "positions", {}, {"window": 3}),
        (Wrapped, "mask short positions", {"ulysses": -1}, {"window": 6}),
    ],
)
def test_masks_positions_and_open_attention_are_those_of_one_process(
    worlds: Worlds, kind: type[nn.Module], keys: str, options: Any, args: Any
) -> None:
    for loss_difference, weight_difference in worlds(2).run(trained, kind, keys, options, **args):
        assert loss_difference < 1e-5 and weight_difference < 1e-5


@pytest.mark.parametrize(
    ("kind", "keys", "text"),
    [
        (Offset, "", 'put "position_ids" of the full sequence into the batch'),
        (Fixed, "", "computes attention without torch.nn.functional.scaled_dot_product_attention"),
        (Decoder, "restart", "packed sequences are not supported over cp"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(
    worlds: Worlds, kind: type[nn.Module], keys: str, text: str
) -> None:
    kinds = worlds(2).failures(trained, kind, keys, {})
    assert all(name == "UsageError" and text in found for name, found in kinds), kinds


class RwkvBlock(nn.Module):
    """A recurrence of the transformers library, by its name."""


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.LSTM(4, 4), r"1 \(LSTM\) is recurrent"),
        (nn.GRUCell(4, 4), r"1 \(GRUCell\) is recurrent"),
        (RwkvBlock(), r"1 \(RwkvBlock\) is recurrent"),
        (nn.Conv1d(4, 4, 3), r"1 \(Conv1d, kernel 3\) is a convolution along the sequence"),
    ],
)
def test_modules_that_mix_positions_are_refused_by_kind(module: nn.Module, text: str) -> None:
    with pytest.raises(UsageError, match=text) as error:
        check_mixers(nn.Sequential(nn.Linear(4, 4), module))
    assert "elsewhere=True" in error.value.hint
    check_mixers(nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv2d(1, 1, 3)))


FAMILIES = {
    "Llama": {},
    "Qwen2": {"num_key_value_heads": 2},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma": {"head_dim": 8, "num_key_value_heads": 2},
    "Falcon": {},
}


def family(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=WORDS, num_attention_heads=4, **sizes, **FAMILIES[name]
    )
    config.use_cache = False
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return getattr(transformers, kind)(config).eval()


def verified_family(name: str, keys: str) -> str:
    run = parallelize(
        family(name),
        sgd,
        lambda out, batch: loss(out.logits, batch),
        mesh=mesh.make_mesh(cp=2),
        context=ContextParallel(),
        norm=True,
    )
    return str(run.verify([batch(4, keys)]))


@pytest.mark.thorough
@pytest.mark.parametrize("keys", ["", "mask short", "mask positions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_the_library(worlds: Worlds, name: str, keys: str) -> None:
    pytest.importorskip("transformers")
    assert "gradients within" in worlds(2).run(verified_family, name, keys)[0]
