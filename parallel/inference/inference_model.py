"""A model that is cut over a mesh, and generates tokens."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import EXPERT_AXIS, STAGE_AXIS, Mesh
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.inference.compiled_decode import compile_session
from pdrun.parallel.inference.decode import (
    CHECKED_TOKENS,
    NARROW_CHECK,
    WIDE_CHECK,
    CachedSession,
    GeneratedRows,
    PlainCachedSession,
    RecomputedSession,
    SessionFactory,
    generate_rows,
    measure_caches,
)
from pdrun.parallel.inference.encoder_decoder import (
    EncoderDecoderSession,
    EncoderInputs,
    digest_inputs,
    parse_inputs,
    probe_inputs,
    rows_of_inputs,
)
from pdrun.parallel.inference.prompts import Prompts, check_prompts, parse_prompts
from pdrun.parallel.inference.reference import GenerationComparison, compare_with_full
from pdrun.parallel.inference.sampling import GENERATE, Sampling
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.model.shards import Ranges, shard_of
from pdrun.parallel.tensor import Strategy
from pdrun.parallel.training.rank_agreement import PARALLELIZE, RankAgreement

INFER = "pdrun.infer"
SAME_CALL_HINT = "every rank calls it with the same prompts and options; seed= too"


@dataclass(frozen=True)
class InferenceMemory:
    """
    Bytes on this rank.

    Attributes:
        weights: shards of weights.
        buffers: which are not sharded.
        cache: keys and values of this rank's rows, and of its heads.
    """

    weights: int
    buffers: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.buffers + self.cache


@dataclass(frozen=True)
class WeightPart:
    """
    The part of a weight that a rank has.

    Attributes:
        shape: of the full weight.
        layout: the axes that cut each dim.
        ranges: for each dim the (low, high) ranges of this rank.
    """

    shape: tuple[int, ...]
    layout: L
    ranges: tuple[Ranges, ...]


class InferenceModel:
    """
    The result of `pdrun.infer`.

    Attributes:
        model: this rank's shards.
        mesh: the devices.
        axes: this rank's groups; ``axes.counts`` has the collectives.
        vocabulary: number of token ids.
        max_length: tokens that a prompt and its new tokens may have together; None: unlimited.
    """

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module,
        mesh: Mesh,
        axes: MeshGroups,
        agreement: RankAgreement,
        session: SessionFactory,
        max_length: int | None,
        strategy: Strategy | None,
        *,
        is_compiled: bool = False,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.axes = axes
        self._original = original
        self._agreement = agreement
        self._strategy = strategy
        self._tensor = axes[mesh.tensor_axes]
        config = getattr(model, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        positions = positions or getattr(config, "max_target_positions", None)
        self.max_length = max_length if max_length is not None else positions
        self._stages = axes[STAGE_AXIS]
        self._rows = axes[mesh.row_axes]
        with torch.inference_mode():
            first = Prompts(((0,),), 1), 1, axes.device, probe_inputs(model)
            if session in (CachedSession, PlainCachedSession):
                self.vocabulary = int(RecomputedSession(model, *first).start().shape[-1])
                session = self._choose_session(session, is_compiled)
            probe = session(model, *first)
            axes.reset_counts()
            self.vocabulary = int(probe.start().shape[-1])
        self._per_token = {key: (count.calls, count.nbytes) for key, count in axes.counts.items()}
        self._layers: list[tuple[int, int | None]] = list(_cache_layers(probe))
        self._eager_session = session
        self._session = compile_session(session, model) if is_compiled else session

    def _choose_session(self, session: SessionFactory, is_compiled: bool) -> SessionFactory:
        """
        Return a session whose tokens are those of full sequences: this one, or that without caches.

        Raises:
            UsageError: caches differ, and full sequences cannot replace them.
        """
        if self.max_length is not None and self.max_length < CHECKED_TOKENS:
            return session
        device = self.axes.device
        difference = math.inf
        try:
            difference = measure_caches(self.model, session, device, self.vocabulary)
        except PdrunError:
            raise
        except Exception:
            if session is PlainCachedSession:
                raise
        dtypes = {param.dtype for param in self.model.parameters()}
        is_narrow = bool(dtypes & {torch.float16, torch.bfloat16})
        is_wrong = difference > (NARROW_CHECK if is_narrow else WIDE_CHECK)
        count = torch.tensor([int(is_wrong)], device=device)
        # only the last stage has logits
        if not int(self.axes[self.axes.grid.names].all_reduce(count, "max")):
            return session
        kind = type(self.model).__name__
        if session is PlainCachedSession or is_compiled:
            raise UsageError(
                f"{kind}: logits with caches differ from those of full sequences",
                where=INFER,
                hint="compile=True needs a model whose caches can have rows of several lengths"
                if is_compiled
                else "positions are those of cache.positions(length), and attention uses the mask",
            )
        if all(index == 0 for index in (self._rows.index, self._stages.index, self._tensor.index)):
            text = "its caches do not keep rows of several lengths apart, so each token computes"
            print(f"pdrun: {kind}: {text} its full sequence", file=sys.stderr, flush=True)
        return RecomputedSession

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, without gradients; ranks of one tensor group pass the same input."""
        with torch.inference_mode(), naming_infer():
            return self.model(*args, **kwargs)

    def generate(
        self,
        ids: Any,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos: int | Sequence[int] | None = None,
        cache: int | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> list[list[int]]:
        """
        Return the new tokens of each prompt, on every rank. Every rank calls this with the same
        arguments.

        Tokens do not depend on the mesh: a sampled token depends on its logits, the seed, the index
        of the prompt and the position.

        Args:
            ids: prompts: lists of token ids, or a tensor ``[rows, length]``.
            max_new_tokens: per prompt.
            temperature: 0: the most likely token; above: tokens are sampled.
            top_k: sample from the k most likely tokens.
            top_p: sample from the most likely tokens whose probabilities add up to this.
            seed: of the random numbers.
            eos: a token that ends a row, or several; it is part of the result.
            cache: places of the caches; default: as many as needed.
            inputs: of the encoder of a model that has one: tensors with a row for each prompt, such
                as ``{"input_features": ...}``; ``ids`` are the decoder's.

        Raises:
            UsageError: an argument is wrong, a prompt is empty, too long or not in the vocabulary,
                or ranks differ.
            ConfigError: logits are not finite.
            PeerLost: another rank was lost.
        """
        prompts = parse_prompts(ids)
        encoder_inputs = parse_inputs(self.model, inputs, prompts)
        sampling = Sampling(temperature, top_k, top_p, seed)
        ends = _parse_ends(eos, self.vocabulary)
        places = check_prompts(prompts, max_new_tokens, self.vocabulary, self.max_length, cache)
        call = {
            "ids": f"{len(prompts.ids)} prompts ({prompts.digest()})",
            "max_new_tokens": max_new_tokens,
            **asdict(sampling),
            "eos": ends,
            "cache": cache,
            "inputs": digest_inputs(encoder_inputs),
        }
        self._agreement.check_equal(call.items(), where=GENERATE, hint=SAME_CALL_HINT)
        with naming_infer():
            return _check_finite(
                self._generate(prompts, encoder_inputs, places, max_new_tokens, sampling, ends)
            )

    def _generate(
        self,
        prompts: Prompts,
        encoder_inputs: EncoderInputs,
        places: int,
        new: int,
        sampling: Sampling,
        ends: tuple[int, ...],
    ) -> GeneratedRows:
        """Return the tokens of all prompts."""
        mine = prompts.part_for(self._rows.index, self._rows.size)
        made = GeneratedRows([], [])
        # ranks that have the experts of others compute with them, if need be without own rows
        computed = mine
        if not mine.ids and self.mesh.ep > 1:
            computed = replace(prompts, ids=prompts.ids[:1])
        if computed.ids:
            with torch.inference_mode():
                own_inputs = rows_of_inputs(encoder_inputs, computed.rows)
                session = self._session(self.model, computed, places, self.axes.device, own_inputs)
                made = generate_rows(
                    session,
                    computed.rows,
                    new,
                    sampling,
                    ends,
                    self._share_tokens,
                    self._agree_end,
                )
        if not mine.ids:
            made = GeneratedRows([], [])
        return self._join_rows(made)

    def _share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the last stage's first rank, on all ranks with the same rows."""
        tokens = self._tensor.broadcast(tokens)
        return self._stages.broadcast(tokens, self._stages.size - 1)

    def _agree_end(self, ended: torch.Tensor) -> torch.Tensor:
        if self.mesh.ep == 1:
            return ended
        return self.axes[EXPERT_AXIS].all_reduce(ended.long(), "min")

    def _join_rows(self, made: GeneratedRows) -> GeneratedRows:
        """Return what all ranks with other rows generated, in the order of the prompts."""
        content = torch.frombuffer(bytearray(json.dumps(asdict(made)).encode()), dtype=torch.uint8)
        parts = ShardedGroup(self._rows).gather_bytes(content, "the tokens of generate")
        found = [GeneratedRows(**json.loads(bytes(part.tolist()))) for part in parts]
        return GeneratedRows(
            [tokens for part in found for tokens in part.tokens],
            [bad for part in found for bad in part.not_finite],
        )

    def verify(
        self,
        ids: Any,
        max_new_tokens: int = 8,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> GenerationComparison:
        """
        Compare logits and greedy tokens with those of the full model in one process. Every rank
        calls this, and needs memory for the full model.

        Raises:
            ConfigError: they differ by more than rounding.
        """
        prompts = parse_prompts(ids)
        encoder_inputs = parse_inputs(self.model, inputs, prompts)
        tokens = self.generate(ids, max_new_tokens, inputs=inputs)
        places = check_prompts(prompts, max_new_tokens, self.vocabulary, self.max_length, None)
        with torch.inference_mode(), naming_infer():
            return compare_with_full(
                self.model,
                self._original,
                self.axes,
                self._eager_session,
                prompts,
                places,
                tokens,
                encoder_inputs,
            )

    def layout(self) -> dict[str, WeightPart]:
        """
        Return which part of each weight this rank has, by the weight's name. A weight of another
        stage is missing.
        """
        found = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            shard = shard_of(param)
            found[name] = WeightPart(shard.shape, shard.layout, shard.ranges)
        return found

    def memory(self, rows: int = 1, length: int | None = None) -> InferenceMemory:
        """
        Return the bytes on this rank, without activations.

        Args:
            rows: prompts in a call, on all ranks together.
            length: places of the caches; default: ``max_length``.

        Raises:
            UsageError: a number is no count.
        """
        for name, value in (("rows", rows), ("length", length)):
            if value is not None and (type(value) is not int or value < 1):
                what = f"{name} must be a whole number from 1, got {value!r}"
                raise UsageError(what, where="pdrun.infer.memory")
        places = length or self.max_length or 0
        mine = -(-rows // self._rows.size)
        cache = sum(
            nbytes * (places if window is None else min(places, window))
            for nbytes, window in self._layers
        )
        return InferenceMemory(
            sum(param.nbytes for param in self.model.parameters()),
            sum(buffer.nbytes for buffer in self.model.buffers()),
            cache * mine,
        )

    def explain(self) -> str:
        """Return how the model is cut, and what a token costs, as text."""
        memory = self.memory(length=1)
        cut = [param for param in self.model.parameters() if not shard_of(param).is_full]
        lines = [
            f"{self.mesh}: prompts over {', '.join(self.mesh.row_axes) or 'dp'}, weights over"
            f" {', '.join(self.mesh.tensor_axes)}",
            f"weights: {memory.weights:,} bytes on this rank, {len(cut)} of"
            f" {len(list(self.model.parameters()))} cut",
        ]
        if self._layers:
            lines.append(f"cache: {memory.cache:,} bytes a prompt and place on this rank")
        else:
            lines.append("cache: none, every token computes its full sequence")
        for (name, axes), (calls, nbytes) in sorted(self._per_token.items()):
            where = ", ".join(axes)
            lines.append(f"each token: {calls} x {name} over {where}, {nbytes:,} bytes a row")
        return "\n".join(lines)


@contextmanager
def naming_infer() -> Iterator[None]:
    """Inside, errors of what `pdrun.parallelize` does too name `pdrun.infer`."""
    try:
        yield
    except PdrunError as error:
        if error.where == PARALLELIZE:
            error.where = INFER
        raise


def _cache_layers(probe: Any) -> Iterator[tuple[int, int | None]]:
    """Yield the bytes of a row and place of each layer's cache, and the layer's window."""
    if isinstance(probe, PlainCachedSession):
        for keys, values in probe.rows.memory.values():
            yield keys.nbytes + values.nbytes, None
    if isinstance(probe, (CachedSession, EncoderDecoderSession)):
        for layer in probe.cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None:
                window = getattr(probe.model.config, "sliding_window", None)
                yield keys.nbytes + values.nbytes, window if layer.is_sliding else None


def _parse_ends(eos: Any, vocabulary: int) -> tuple[int, ...]:
    if eos is None:
        return ()
    is_list = isinstance(eos, (Sequence, Set)) and not isinstance(eos, (str, bytes))
    ends = tuple(eos) if is_list else (eos,)
    for token in ends:
        if type(token) is not int or not 0 <= token < vocabulary:
            what = f"eos={eos!r}: {token!r} is not an id of the vocabulary of {vocabulary}"
            raise UsageError(what, where=GENERATE)
    return ends


def _check_finite(made: GeneratedRows) -> list[list[int]]:
    bad = [str(row) for row, is_bad in enumerate(made.not_finite) if is_bad]
    if bad:
        raise ConfigError(
            f"the logits of prompt {', '.join(bad[:5])} are not finite",
            where=GENERATE,
            hint="the weights are damaged, or too large for their type: use dtype=torch.bfloat16"
            " or torch.float32",
        )
    return made.tokens
