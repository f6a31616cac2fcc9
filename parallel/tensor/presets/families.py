"""Strategies by model type, by the plan that a model has in transformers, or for any model."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.tensor.presets.any_model import MIN_SPLIT_SIZE, style_any_model
from pdrun.parallel.tensor.presets.huggingface_plan import find_tp_plan, translate_tp_plan
from pdrun.parallel.tensor.strategy import WEIGHT_STYLES, Strategy
from pdrun.parallel.tensor.style import STRATEGY_API, AxisNames, ModuleStyle
from pdrun.parallel.tensor.styles import col, heads, replicate, row, seq, vocab

Blocks = int | tuple[int, ...]
BlockSizes = Callable[[Any], Blocks]
"""From a configuration, the matrices side by side in a fused output."""


@dataclass(frozen=True)
class ModelNames:
    """
    The names of a family's modules by role. Globs that match nothing are left out.

    Attributes:
        attentions: modules that count heads.
        columns, rows: linear modules, sharded on their output and on their input.
        fused: linear modules with several matrices in their output.
        vocabulary: embeddings and heads; their styles are equal if they are tied.
        tied_biases: other names of the bias of a head.
        by_head: weights and embeddings with an entry per head.
        whole: modules of an attention that each rank computes in full, for its heads.
        joined: modules of an attention that compute with the results of all heads.
        norms: with sequence parallel, modules on shards of the sequence.
        first_layer: with sequence parallel, where the sequence is sharded; "": not known.
        inputs: arguments of attentions by head.
    """

    attentions: str
    columns: str
    rows: str
    vocabulary: str
    fused: Mapping[str, BlockSizes] = field(default_factory=dict)
    tied_biases: str = ""
    by_head: str = ""
    whole: str = "*.self_attn.[qk]_norm"
    joined: str = ""
    norms: str = ""
    first_layer: str = ""
    inputs: Mapping[str, int] = field(default_factory=dict)

    def build_strategy(
        self, model: nn.Module, axis: AxisNames, sequence: bool, gather: bool
    ) -> Strategy:
        """Return the strategy of a model of this family."""
        dim = 1 if sequence else None
        config = getattr(model, "config", None)
        rules: dict[str, ModuleStyle] = {
            self.attentions: heads(axis, inputs=self.inputs),
            self.columns: col(axis, sequence=dim),
            self.rows: row(axis, sequence=dim),
            self.vocabulary: vocab(axis, gather=gather),
            self.tied_biases: vocab(axis, gather=gather),
            self.by_head: col(axis),
            self.whole: replicate(axis),
            self.joined: replicate(),
        }
        for glob, sizes in self.fused.items():
            rules[glob] = col(axis, sequence=dim, blocks=sizes(config))
        if sequence:
            rules[self.first_layer] = seq(axis, cut=True)
            rules[self.norms] = seq(axis)
            rules |= _sequence_vocabulary(model, self.vocabulary, axis, gather)
            rules.pop(self.vocabulary)
        return Strategy(keep_matching(rules, model))


def _sequence_vocabulary(
    model: nn.Module, globs: str, axis: AxisNames, gather: bool
) -> dict[str, ModuleStyle]:
    """Return the rules of embeddings, and of heads that gather the sequence."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    rules: dict[str, ModuleStyle] = {}
    for glob in globs.split("|"):
        for name in fnmatch.filter(names, glob):
            if isinstance(model.get_submodule(name), nn.Embedding):
                rules[name] = vocab(axis)
            else:
                rules[name] = vocab(axis, gather=gather, sequence=1)
    return rules


def keep_matching(rules: Mapping[str, ModuleStyle], model: nn.Module) -> dict[str, ModuleStyle]:
    """Return the rules without the globs that match nothing that their style is for."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    kept: dict[str, ModuleStyle] = {}
    for rule, style in rules.items():
        names = modules + params if isinstance(style, WEIGHT_STYLES) else modules
        globs = [glob for glob in rule.split("|") if glob and fnmatch.filter(names, glob)]
        if globs:
            kept["|".join(globs)] = style
    return kept


def gpt2_strategy(axis: AxisNames = "tp", sequence: bool = False, gather: bool = True) -> Strategy:
    """
    Return Megatron's sharding of a GPT-2 with a language-modelling head, which is tied to the
    embedding.

    Args:
        axis, sequence, gather: see `strategy_for`.
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


def _two(config: Any) -> Blocks:
    return 2


def _three(config: Any) -> Blocks:
    return 3


def _qkv_widths(config: Any) -> Blocks:
    """Return the widths of q, k and v, one after the other."""
    width = getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * width
    return (config.num_attention_heads * width, kv, kv)


def _side_by_side(times: int, config: Any) -> Blocks:
    """Return one block: each head has its q, k and v side by side."""
    return (times * int(config.hidden_size),)


def _falcon_widths(config: Any) -> Blocks:
    width = config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        # groups of queries, each with its key and value
        return ((config.num_attention_heads + 2 * config.num_kv_heads) * width,)
    if config.multi_query:
        return (config.hidden_size, width, width)
    return _side_by_side(3, config)


LLAMA = ModelNames(
    attentions="model.layers.*.self_attn",
    columns="model.layers.*.self_attn.[qkv]_proj|model.layers.*.gate_proj|model.layers.*.up_proj",
    rows="model.layers.*.self_attn.o_proj|model.layers.*.down_proj",
    vocabulary="model.embed_tokens|lm_head",
    whole="model.layers.*.self_attn.[qk]_norm",
    norms="model.layers.*.*_layernorm|model.norm",
    first_layer="model.layers.0",
)
BERT = ModelNames(
    attentions="*.attention.self",
    columns="*.attention.self.query|*.attention.self.key|*.attention.self.value"
    "|*.intermediate.dense",
    rows="*.layer.*.output.dense",
    vocabulary="*.word_embeddings|cls.predictions.decoder|lm_head.decoder|generator_lm_head",
    tied_biases="cls.predictions.bias|lm_head.bias",
)
BART = ModelNames(
    attentions="*.self_attn|*.encoder_attn",
    columns="*_attn.[qkv]_proj|*.fc1",
    rows="*_attn.out_proj|*.fc2",
    vocabulary="*.shared|*.embed_tokens|lm_head|proj_out|output_projection",
)
BERT_PERCEPTRONS = replace(
    BERT,
    attentions="",
    columns="*.intermediate.dense",
    rows="*.layer.?.output.dense|*.layer.??.output.dense",
)
"""Attentions stay whole: heads share relative positions, or windows."""
BART_PERCEPTRONS = replace(BART, attentions="", columns="*.fc1", rows="*.fc2")
MODELS: dict[str, ModelNames] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite"),
            *("mixtral", "qwen2_moe", "qwen3_moe", "cohere", "stablelm"),
        ),
        LLAMA,
    ),
    "phi": ModelNames(
        attentions=LLAMA.attentions,
        columns="model.layers.*.self_attn.[qkv]_proj|model.layers.*.mlp.fc1",
        rows="model.layers.*.self_attn.dense|model.layers.*.mlp.fc2",
        vocabulary=LLAMA.vocabulary,
        whole="model.layers.*.self_attn.[qk]_layernorm",
    ),
    "phi3": ModelNames(
        attentions=LLAMA.attentions,
        columns="",
        rows=LLAMA.rows,
        vocabulary=LLAMA.vocabulary,
        fused={"*.self_attn.qkv_proj": _qkv_widths, "*.mlp.gate_up_proj": _two},
    ),
    "gpt_neox": ModelNames(
        attentions="gpt_neox.layers.*.attention",
        columns="gpt_neox.layers.*.mlp.dense_h_to_4h",
        rows="gpt_neox.layers.*.attention.dense|gpt_neox.layers.*.mlp.dense_4h_to_h",
        vocabulary="gpt_neox.embed_in|embed_out|lm_head",
        fused={"*.attention.query_key_value": functools.partial(_side_by_side, 3)},
    ),
    "persimmon": ModelNames(
        attentions=LLAMA.attentions,
        columns="model.layers.*.mlp.dense_h_to_4h",
        rows="model.layers.*.self_attn.dense|model.layers.*.mlp.dense_4h_to_h",
        vocabulary=LLAMA.vocabulary,
        fused={"*.self_attn.query_key_value": functools.partial(_side_by_side, 3)},
        whole="model.layers.*.self_attn.[qk]_layernorm",
    ),
    "mpt": ModelNames(
        attentions="transformer.blocks.*.attn",
        columns="transformer.blocks.*.ffn.up_proj",
        rows="transformer.blocks.*.attn.out_proj|transformer.blocks.*.ffn.down_proj",
        vocabulary="transformer.wte|lm_head",
        fused={"*.attn.Wqkv": _three},
        inputs={"position_bias": -3},
    ),
    **dict.fromkeys(
        ("gpt_bigcode", "codegen"),
        # the attention stays whole: its keys have one head, or its q, k and v an order of their own
        ModelNames(
            attentions="",
            columns="*.mlp.c_fc|*.mlp.fc_in",
            rows="*.mlp.c_proj|*.mlp.fc_out",
            vocabulary="transformer.wte|lm_head",
        ),
    ),
    "openai-gpt": ModelNames(
        attentions="transformer.h.*.attn",
        columns="transformer.h.*.mlp.c_fc",
        rows="transformer.h.*.c_proj",
        vocabulary="transformer.tokens_embed|lm_head",
        fused={"*.attn.c_attn": _three},
        joined="*.attn.resid_dropout|*.mlp.dropout",
    ),
    "ctrl": ModelNames(
        attentions="*.multi_head_attention",
        columns="*.multi_head_attention.W[qkv]|*.ffn.0",
        rows="*.multi_head_attention.dense|*.ffn.2",
        vocabulary="transformer.w|lm_head",
    ),
    "gptj": ModelNames(
        attentions="transformer.h.*.attn",
        columns="transformer.h.*.attn.[qkv]_proj|transformer.h.*.mlp.fc_in",
        rows="transformer.h.*.attn.out_proj|transformer.h.*.mlp.fc_out",
        vocabulary="transformer.wte|lm_head",
    ),
    "gpt_neo": ModelNames(
        attentions="transformer.h.*.attn.attention",
        columns="transformer.h.*.attention.[qkv]_proj|transformer.h.*.mlp.c_fc",
        rows="transformer.h.*.attention.out_proj|transformer.h.*.mlp.c_proj",
        vocabulary="transformer.wte|lm_head",
    ),
    "falcon": ModelNames(
        attentions="transformer.h.*.self_attention",
        columns="transformer.h.*.mlp.dense_h_to_4h",
        rows="transformer.h.*.self_attention.dense|transformer.h.*.mlp.dense_4h_to_h",
        vocabulary="transformer.word_embeddings|lm_head",
        fused={"*.self_attention.query_key_value": _falcon_widths},
        inputs={"alibi": -3, "attention_mask": -3},
    ),
    "bloom": ModelNames(
        attentions="transformer.h.*.self_attention",
        columns="transformer.h.*.mlp.dense_h_to_4h",
        rows="transformer.h.*.self_attention.dense|transformer.h.*.mlp.dense_4h_to_h",
        vocabulary="transformer.word_embeddings|lm_head",
        fused={"*.self_attention.query_key_value": functools.partial(_side_by_side, 3)},
        inputs={"alibi": -3},
    ),
    "opt": BART,
    **dict.fromkeys(("bart", "mbart", "pegasus", "whisper", "biogpt"), BART),
    **dict.fromkeys(("marian", "m2m_100", "blenderbot", "blenderbot-small", "plbart"), BART),
    **dict.fromkeys(("time_series_transformer", "patchtst"), BART),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "camembert"), BERT),
    **dict.fromkeys(("big_bird", "data2vec-text", "ernie", "layoutlm"), BERT),
    "esm": replace(BERT, tied_biases=""),
    **dict.fromkeys(("megatron-bert", "rembert", "roformer", "xmod"), BERT),
    **dict.fromkeys(
        ("deberta", "deberta-v2", "convbert", "longformer", "luke", "yoso"), BERT_PERCEPTRONS
    ),
    **dict.fromkeys(("xglm", "led", "bigbird_pegasus"), BART_PERCEPTRONS),
    "mpnet": ModelNames(
        attentions="*.attention.attn",
        columns="*.attention.attn.[qkv]|*.intermediate.dense",
        rows="*.attention.attn.o|*.layer.*.output.dense",
        vocabulary="*.word_embeddings|lm_head.decoder",
        tied_biases="lm_head.bias",
        by_head="*.relative_attention_bias",
    ),
    **dict.fromkeys(
        ("xlm", "flaubert"),
        ModelNames(
            attentions="transformer.attentions.?|transformer.attentions.??",
            columns="*.attentions.*.[qkv]_lin|*.ffns.*.lin1",
            rows="*.attentions.*.out_lin|*.ffns.*.lin2",
            vocabulary="transformer.embeddings|pred_layer.proj",
        ),
    ),
    "albert": ModelNames(
        attentions="*.attention",
        columns="*.attention.query|*.attention.key|*.attention.value|*.ffn",
        rows="*.attention.dense|*.ffn_output",
        vocabulary="*.word_embeddings|predictions.decoder",
        tied_biases="predictions.bias",
        joined="*.attention.LayerNorm|*.attention.output_dropout",
    ),
    "modernbert": ModelNames(
        attentions="*.layers.*.attn",
        columns="",
        rows="*.attn.Wo|*.mlp.Wo",
        vocabulary="*.tok_embeddings|decoder",
        fused={"*.attn.Wqkv": _three, "*.mlp.Wi": _two},
    ),
    "distilbert": ModelNames(
        attentions="*.attention",
        columns="*.attention.[qkv]_lin|*.ffn.lin1",
        rows="*.attention.out_lin|*.ffn.lin2",
        vocabulary="*.word_embeddings|vocab_projector",
    ),
    **dict.fromkeys(
        ("t5", "mt5", "umt5"),
        ModelNames(
            attentions="*.SelfAttention|*.EncDecAttention",
            columns="*Attention.[qkv]|*.DenseReluDense.wi|*.DenseReluDense.wi_[01]",
            rows="*Attention.o|*.DenseReluDense.wo",
            vocabulary="shared|encoder.embed_tokens|decoder.embed_tokens|lm_head",
            by_head="*.relative_attention_bias",
        ),
    ),
    **dict.fromkeys(
        ("vit", "deit", "beit", "data2vec-vision", "vit_msn"),
        ModelNames(
            attentions="*.layers.*.attention",
            columns="*.layers.*.attention.[qkv]_proj|*.layers.*.mlp.fc1",
            rows="*.layers.*.attention.o_proj|*.layers.*.mlp.fc2",
            vocabulary="",
        ),
    ),
    **dict.fromkeys(
        ("dinov2", "dinov2_with_registers"),
        ModelNames(
            attentions="*.layer.*.attention",
            columns="*.layer.*.attention.[qkv]_proj|*.layer.*.mlp.fc1",
            rows="*.layer.*.attention.o_proj|*.layer.*.mlp.fc2|*.layer.*.mlp.weights_out",
            vocabulary="",
            fused={"*.layer.*.mlp.weights_in": _two},
        ),
    ),
    **dict.fromkeys(
        ("wav2vec2", "hubert", "unispeech-sat", "data2vec-audio"),
        ModelNames(
            attentions="*.encoder.layers.*.attention",
            columns="*.attention.[qkv]_proj|*.feed_forward.intermediate_dense",
            rows="*.attention.out_proj|*.feed_forward.output_dense",
            vocabulary="",
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        ModelNames(
            attentions=LLAMA.attentions,
            columns="*.self_attn.q_b_proj|*.self_attn.kv_b_proj|*.self_attn.q_proj"
            "|model.layers.*.gate_proj|model.layers.*.up_proj",
            rows=LLAMA.rows,
            vocabulary=LLAMA.vocabulary,
            whole="*.self_attn.q_a_*|*.self_attn.kv_a_*",
        ),
    ),
    "gpt_oss": ModelNames(
        attentions=LLAMA.attentions,
        columns="model.layers.*.self_attn.[qkv]_proj",
        rows="model.layers.*.self_attn.o_proj",
        vocabulary=LLAMA.vocabulary,
        by_head="model.layers.*.self_attn.sinks",
    ),
}
"""By the ``model_type`` of a configuration; GPT-2 has its own function."""


def strategy_for(
    model: nn.Module, axis: AxisNames = "tp", sequence: bool = False, gather: bool = True
) -> Strategy:
    """
    Return the strategy for a model.

    It is found by ``model.config.model_type``, or translated from the plan that the model has in
    transformers. In all other models each linear module and convolution computes a shard of its
    output, which is gathered, and each embedding a shard of its vocabulary. The code between them
    runs in full on every rank.

    Args:
        model: any module.
        axis: the tensor axis, or several, major first.
        sequence: shard the sequence between the sharded modules, from the first layer on: positions
            need full sequences. Its length must be a multiple of the axis.
        gather: False leaves logits sharded, for `pdrun.cross_entropy`.

    Raises:
        UsageError: the model type is not known with ``sequence``, or nothing can be sharded.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    names = MODELS.get(str(model_type))
    if model_type == "gpt2" and "transformer" in dict(model.named_children()):  # no wrapper's
        return gpt2_strategy(axis, sequence, gather)
    if sequence and (names is None or not names.first_layer):
        with_norms = [key for key, one in MODELS.items() if one.first_layer]
        raise UsageError(
            f"sequence=True is not known for {model_type or type(model).__name__}",
            where=STRATEGY_API,
            hint=f"write a Strategy({{...}}); known model types: gpt2, {', '.join(with_norms)}",
        )
    if names is not None:
        strategy = names.build_strategy(model, axis, sequence, gather)
        if strategy.rules:  # in a wrapper, such as that of peft, modules have other names
            return strategy
    plan = find_tp_plan(model)
    rules: dict[str, ModuleStyle] = {}
    if plan:
        rules = translate_tp_plan(model, plan, axis, gather)
    rules = rules or style_any_model(model, axis, gather)
    if not rules:
        raise UsageError(
            f"there is no strategy for {model_type or type(model).__name__}: it has no linear"
            f" module, convolution or embedding of {MIN_SPLIT_SIZE} outputs or ids whose weights"
            " only it uses",
            where=STRATEGY_API,
            hint="use pdrun.Operators, or the axes dp and pp",
        )
    return Strategy(rules)
