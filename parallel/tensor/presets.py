"""Strategies for models of the transformers library, by the names of their modules."""

from __future__ import annotations

import fnmatch

from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.tensor.strategy import Strategy
from pdrun.parallel.tensor.style import STRATEGY_API, AxisNames, ModuleStyle
from pdrun.parallel.tensor.styles import col, heads, replicate, row, seq, vocab


def llama_strategy(axis: AxisNames = "tp", sequence: bool = False, gather: bool = True) -> Strategy:
    """
    Return Megatron's sharding of a Llama with a language-modelling head, and of similar models.

    Args:
        axis: the tensor axis, or several, major first.
        sequence: shard the sequence between the sharded modules, from the first layer on: positions
            need full sequences. Its length must be a multiple of the axis.
        gather: False leaves logits sharded, for `pdrun.cross_entropy`.
    """
    dim = 1 if sequence else None
    rules: dict[str, ModuleStyle] = {
        "model.embed_tokens": vocab(axis),
        "model.layers.*.self_attn": heads(axis),
        "model.layers.*.self_attn.[qkv]_proj": col(axis, sequence=dim),
        "model.layers.*.mlp.gate_proj|model.layers.*.mlp.up_proj": col(axis, sequence=dim),
        "model.layers.*.self_attn.o_proj|model.layers.*.mlp.down_proj": row(axis, sequence=dim),
        "lm_head": vocab(axis, gather=gather, sequence=dim),
    }
    if sequence:
        rules["model.layers.0"] = seq(axis, cut=True)
        rules["model.layers.*.*_layernorm|model.norm"] = seq(axis)
    return Strategy(rules)


def gpt2_strategy(axis: AxisNames = "tp", sequence: bool = False, gather: bool = True) -> Strategy:
    """
    Return Megatron's sharding of a GPT-2 with a language-modelling head, which is tied to the
    embedding.

    Args:
        axis, sequence, gather: see `llama_strategy`.
    """
    dim = 1 if sequence else None
    rules: dict[str, ModuleStyle] = {
        "transformer.wte|lm_head": vocab(axis, gather=gather),
        "transformer.wpe": replicate(),
        "transformer.h.*.attn": heads(axis),
        "transformer.h.*.attn.c_attn": col(axis, sequence=dim, blocks=3),
        "transformer.h.*.mlp.c_fc": col(axis, sequence=dim),
        "transformer.h.*.c_proj": row(axis, sequence=dim),
    }
    if sequence:
        rules["transformer.h.0"] = seq(axis, cut=True)
        rules["transformer.h.*.ln_[12]"] = seq(axis)
        rules["transformer.h.*.resid_dropout|transformer.h.*.mlp.dropout"] = seq(axis)
        rules["transformer.ln_f"] = seq(axis, gather=True)
    else:
        rules["transformer.h.*.resid_dropout"] = replicate()
    return Strategy(rules)


STRATEGIES_BY_MODEL_TYPE = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma"), llama_strategy
) | {"gpt2": gpt2_strategy}
"""By the ``model_type`` of a configuration."""


def strategy_for(
    model: nn.Module, axis: AxisNames = "tp", sequence: bool = False, gather: bool = True
) -> Strategy:
    """
    Return the strategy for a causal language model of transformers.

    Args:
        model: its configuration has the model type.
        axis, sequence, gather: see `llama_strategy`.

    Raises:
        UsageError: there is no strategy for this model type.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in STRATEGIES_BY_MODEL_TYPE:
        known = ", ".join(STRATEGIES_BY_MODEL_TYPE)
        raise UsageError(
            f"there is no strategy for {model_type or type(model).__name__}",
            where=STRATEGY_API,
            hint=did_you_mean(str(model_type), STRATEGIES_BY_MODEL_TYPE)
            or f"write a Strategy({{...}}); known model types: {known}",
        )
    strategy = STRATEGIES_BY_MODEL_TYPE[model_type](axis, sequence, gather)
    head_norms = "model.layers.*.self_attn.[qk]_norm"
    if fnmatch.filter((name for name, _ in model.named_modules()), head_norms):
        # a norm over the width of a head: each rank uses it for its heads
        return Strategy({**strategy.rules, head_norms: replicate(axis)})
    return strategy
