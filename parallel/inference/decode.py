"""
Generates the tokens of some prompts on one rank.

Models of the transformers library compute the prompt once, and then one token at a time with a
static cache: keys and values of this rank's heads, in memory of fixed shape. So do models whose
attention has a `KVCache`. Others compute the full sequence for every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.inference.encoder_decoder import (
    EncoderDecoderSession,
    EncoderInputs,
    is_encoder_decoder,
)
from pdrun.parallel.inference.kv_cache import CachedRows, find_caches
from pdrun.parallel.inference.prompts import PADDING_ID, Prompts
from pdrun.parallel.inference.sampling import Sampling

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""The argument of forward for a cache, in newer and older versions of transformers."""
END_CHECK_TOKENS = 8
"""Tokens between two looks at whether all rows have ended: each waits for the device."""
CHECKED_TOKENS = 7
"""Of two prompts, for a comparison of caches with full sequences."""
WIDE_CHECK, NARROW_CHECK = 1e-3, 0.3
"""Relative differences that can be rounding, in fp32 and in narrower types."""
DecodeStep = Callable[[nn.Module, torch.Tensor, dict[str, Any]], torch.Tensor]
"""`compute_last`, compiled."""


class GenerationSession(Protocol):
    """The state of a generation: logits of the next token, first of prompts, then of a token."""

    def start(self) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` after the prompts."""

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token ``[rows]``."""


class SessionFactory(Protocol):
    """Makes the session of some prompts."""

    def __call__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
    ) -> GenerationSession:
        """
        Return it.

        Args:
            places: of the caches.
            inputs: of an encoder, one row per prompt; empty without one.
        """


def find_session(model: nn.Module) -> SessionFactory:
    """Return how a model generates."""
    if is_encoder_decoder(model):
        return EncoderDecoderSession
    config = getattr(model, "config", None)
    if find_cache_argument(model) and callable(getattr(config, "get_text_config", None)):
        return CachedSession
    return PlainCachedSession if find_caches(model) else RecomputedSession


def find_cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument of forward that takes a cache; None without one."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in arguments), None)


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a model's output."""
    if isinstance(output, tuple):
        output = output[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        kind = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UsageError(
            f"the model must return logits [rows, length, vocabulary], got {kind}",
            where="pdrun.infer",
            hint="pass a model with a language-modelling head, such as AutoModelForCausalLM",
        )
    return logits


class CachedSession:
    """A model of transformers with a static cache; prompts are padded on the left."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
        step: DecodeStep | None = None,
        cache: Any = None,
    ) -> None:
        self.model = model
        self._ids = prompts.left_padded(device)
        self.cache: Any = make_static_cache(model, places) if cache is None else cache
        starts = [prompts.width - len(ids) for ids in prompts.ids]
        first = torch.tensor(starts, dtype=torch.int64)[:, None].to(device)
        columns = torch.arange(places, device=device)[None]
        # places that are not filled yet are hidden by the causal mask
        self._mask = (columns >= first).to(torch.int64) if any(starts) else None
        self._positions = (columns - first).clamp_(min=0)
        self._at = 0
        arguments = inspect.signature(model.forward).parameters
        self._fixed: dict[str, Any] = {
            str(find_cache_argument(model)): self.cache,
            "use_cache": True,
            **({"logits_to_keep": 1} if "logits_to_keep" in arguments else {}),
        }
        self._takes_positions = "position_ids" in arguments
        self._step = step

    def start(self) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` after the prompts."""
        return self._compute(self._ids)

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token ``[rows]``."""
        if self._step is None:
            return self._compute(tokens[:, None])
        given = self._arguments(1)
        if "position_ids" in given:
            given["position_ids"] = given["position_ids"].clone()  # of the same strides each time
        return self._step(self.model, tokens[:, None].clone(), given)

    def _compute(self, ids: torch.Tensor) -> torch.Tensor:
        return compute_last(self.model, ids, self._arguments(ids.shape[1]))

    def _arguments(self, columns: int) -> dict[str, Any]:
        """Return the model's arguments for the next columns, beside their ids."""
        stop = self._at + columns
        given = {**self._fixed, "attention_mask": self._mask}
        if self._takes_positions:
            given["position_ids"] = self._positions[:, self._at : stop]
        self._at = stop
        return given


def make_static_cache(model: nn.Module, places: int) -> Any:
    """Return the empty cache of a causal model of transformers."""
    from transformers import StaticCache  # the model comes from there

    return StaticCache(config=model.config, max_cache_len=places)


def compute_last(model: nn.Module, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the last column."""
    return logits_of(model(input_ids=ids, **given))[:, -1]


class RecomputedSession:
    """
    Any causal model from ids to logits; rows are padded on the right, where earlier tokens do not
    look.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
    ) -> None:
        self.model = model
        self._ids = torch.full((len(prompts.ids), places), PADDING_ID, device=device)
        for row, ids in enumerate(prompts.ids):
            self._ids[row, : len(ids)] = torch.tensor(ids, device=device)
        self._ends = torch.tensor([len(ids) for ids in prompts.ids], device=device)
        self._rows = torch.arange(len(prompts.ids), device=device)
        self._width = prompts.width
        takes_choice = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if takes_choice else {}

    def start(self) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` after the prompts."""
        logits = logits_of(self.model(self._ids[:, : self._width], **self._options))
        return logits[self._rows, self._ends - 1]

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token ``[rows]``."""
        self._ids[self._rows, self._ends] = tokens
        self._ends += 1
        self._width += 1
        return self.start()


class PlainCachedSession:
    """A causal model with a `KVCache` in each attention; rows are padded on the right."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        places: int,
        device: torch.device,
        inputs: EncoderInputs,
    ) -> None:
        self.model = model
        self.rows = CachedRows(places)
        self._caches = find_caches(model)
        self._ids = prompts.right_padded(device)
        self._ends = torch.tensor([len(ids) for ids in prompts.ids], device=device)[:, None]

    def start(self) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary]`` after the prompts."""
        positions = torch.arange(self._ids.shape[1], device=self._ids.device)
        logits = self._compute(self._ids, positions.expand(self._ids.shape))
        last = (self._ends - 1)[:, :, None].expand(-1, -1, logits.shape[-1])
        return logits.gather(1, last)[:, 0]

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits after one more token ``[rows]``."""
        logits = self._compute(tokens[:, None], self._ends)[:, -1]
        self._ends = self._ends + 1
        return logits

    def _compute(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with self.rows.bound_to(self._caches, positions):
            return logits_of(self.model(ids))


def measure_caches(
    model: nn.Module, session: SessionFactory, device: torch.device, vocabulary: int
) -> float:
    """
    Return how far logits with caches are from those of full sequences, relative to these, for two
    prompts of different lengths and the tokens after them.
    """
    ids = [(5 * place + 1) % vocabulary for place in range(CHECKED_TOKENS)]
    width, short = CHECKED_TOKENS - 2, 2
    prompts = Prompts((tuple(ids[:width]), tuple(ids[:short])), width)
    cached, whole = (
        each(model, prompts, CHECKED_TOKENS, device, {}) for each in (session, RecomputedSession)
    )
    pairs = [(cached.start(), whole.start())]
    for place in range(width, CHECKED_TOKENS):
        tokens = torch.tensor([ids[place], ids[place - short]], device=device)
        pairs.append((cached.advance(tokens), whole.advance(tokens)))
    found, wanted = (torch.stack(each).float() for each in zip(*pairs, strict=True))
    finite = found.isfinite() & wanted.isfinite()
    difference = torch.where(finite, found - wanted, 0.0).norm()
    return float(difference / torch.where(finite, wanted, 0.0).norm().clamp_min(1e-30))


@dataclass(frozen=True)
class GeneratedRows:
    """
    What a rank generated.

    Attributes:
        tokens: new tokens of each row, up to its first token of eos, which is included.
        not_finite: whether the logits of a row had a value that is not finite.
    """

    tokens: list[list[int]]
    not_finite: list[bool]


def generate_rows(
    session: GenerationSession,
    rows: range,
    new: int,
    sampling: Sampling,
    eos: tuple[int, ...],
    share: Callable[[torch.Tensor], torch.Tensor],
    agree: Callable[[torch.Tensor], torch.Tensor] = lambda ended: ended,
) -> GeneratedRows:
    """
    Generate up to ``new`` tokens of each row.

    Args:
        rows: indices among all prompts of the call.
        eos: tokens that end a row.
        share: gives ranks that compute the same rows the tokens of one of them.
        agree: gives whether rows of all ranks that must compute together have ended.
    """
    chosen: list[torch.Tensor] = []
    logits = session.start()
    ends = torch.tensor(eos, device=logits.device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=logits.device)
    bad = torch.zeros_like(ended)
    for position in range(new):
        # -inf is a token that a model never chooses
        bad |= ~logits.amax(-1).isfinite() & ~ended
        tokens = share(sampling.choose(logits, rows, position))
        chosen.append(tokens)
        if eos:
            ended |= torch.isin(tokens, ends)
            if (position + 1) % END_CHECK_TOKENS == 0 and bool(agree(ended.all())):
                break
        if position + 1 < new:
            logits = session.advance(tokens)
    bad = share(bad.long()).bool()
    found = torch.stack(chosen, 1).tolist()
    return GeneratedRows([_until_end(row, eos) for row in found], bad.tolist())


def _until_end(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    stop = next((place + 1 for place, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:stop]
