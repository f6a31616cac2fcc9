"""A model that is cut over a mesh, and generates tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.mesh import Mesh
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.inference.decode import (
    CachedSession,
    GeneratedRows,
    SessionFactory,
    generate_rows,
)
from pdrun.parallel.inference.prompts import Prompts, check_prompts, parse_prompts
from pdrun.parallel.inference.reference import GenerationComparison, compare_with_full
from pdrun.parallel.inference.sampling import GENERATE, Sampling
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.tensor import Strategy
from pdrun.parallel.training.rank_agreement import RankAgreement

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
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.axes = axes
        self._original = original
        self._agreement = agreement
        self._session = session
        self._strategy = strategy
        self._tensor = axes[mesh.tensor_axes]
        config = getattr(model, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        self.max_length = max_length if max_length is not None else positions
        with torch.inference_mode():
            probe = session(model, Prompts(((0,),), 1), 1, axes.device)
            axes.reset_counts()
            self.vocabulary = int(probe.start().shape[-1])
        self._per_token = {key: (count.calls, count.nbytes) for key, count in axes.counts.items()}
        self._layers: list[tuple[int, int | None]] = list(_cache_layers(probe))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, without gradients; ranks of one tensor group pass the same input."""
        with torch.inference_mode():
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

        Raises:
            UsageError: an argument is wrong, a prompt is empty, too long or not in the vocabulary,
                or ranks differ.
            ConfigError: logits are not finite.
            PeerLost: another rank was lost.
        """
        prompts = parse_prompts(ids)
        sampling = Sampling(temperature, top_k, top_p, seed)
        ends = _parse_ends(eos, self.vocabulary)
        places = check_prompts(prompts, max_new_tokens, self.vocabulary, self.max_length, cache)
        call = {
            "ids": f"{len(prompts.ids)} prompts ({prompts.digest()})",
            "max_new_tokens": max_new_tokens,
            **asdict(sampling),
            "eos": ends,
            "cache": cache,
        }
        self._agreement.check_equal(call.items(), where=GENERATE, hint=SAME_CALL_HINT)
        rows = self.axes["dp"]
        mine = prompts.part_for(rows.index, rows.size)
        made = GeneratedRows([], [])
        if mine.ids:
            with torch.inference_mode():
                session = self._session(self.model, mine, places, self.axes.device)
                made = generate_rows(
                    session, mine.rows, max_new_tokens, sampling, ends, self._tensor.broadcast
                )
        return _check_finite(self._join_rows(made))

    def _join_rows(self, made: GeneratedRows) -> GeneratedRows:
        """Return what all ranks of dp generated, in the order of the prompts."""
        content = torch.frombuffer(bytearray(json.dumps(asdict(made)).encode()), dtype=torch.uint8)
        parts = ShardedGroup(self.axes["dp"]).gather_bytes(content, "the tokens of generate")
        found = [GeneratedRows(**json.loads(bytes(part.tolist()))) for part in parts]
        return GeneratedRows(
            [tokens for part in found for tokens in part.tokens],
            [bad for part in found for bad in part.not_finite],
        )

    def verify(self, ids: Any, max_new_tokens: int = 8) -> GenerationComparison:
        """
        Compare logits and greedy tokens with those of the full model in one process. Every rank
        calls this, and needs memory for the full model.

        Raises:
            ConfigError: they differ by more than rounding.
        """
        prompts = parse_prompts(ids)
        tokens = self.generate(ids, max_new_tokens)
        places = check_prompts(prompts, max_new_tokens, self.vocabulary, self.max_length, None)
        with torch.inference_mode():
            return compare_with_full(
                self.model, self._original, self._tensor, self._session, prompts, places, tokens
            )

    def memory(self, rows: int = 1, length: int | None = None) -> InferenceMemory:
        """
        Return the bytes on this rank, without activations.

        Args:
            rows: prompts in a call, on all ranks together.
            length: places of the caches; default: ``max_length``.
        """
        places = length or self.max_length or 0
        mine = -(-rows // self.mesh.dp)
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
            f"{self.mesh}: prompts over dp, weights over {', '.join(self.mesh.tensor_axes)}",
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


def _cache_layers(probe: Any) -> Iterator[tuple[int, int | None]]:
    """Yield the bytes of a row and place of each layer's cache, and the layer's window."""
    if isinstance(probe, CachedSession):
        for layer in probe.cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None:
                window = getattr(probe.model.config, "sliding_window", None)
                yield keys.nbytes + values.nbytes, window if layer.is_sliding else None


def _parse_ends(eos: Any, vocabulary: int) -> tuple[int, ...]:
    ends = () if eos is None else (eos,) if type(eos) is int else tuple(eos)
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
