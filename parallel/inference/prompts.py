"""Prompts: checked, padded to one width on every rank, and divided over the ranks of dp."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.inference.sampling import GENERATE

PADDING_ID = 0
"""Fills the places before or behind a prompt; attention never sees them."""


@dataclass(frozen=True)
class Prompts:
    """
    The token ids of all prompts of a call.

    Attributes:
        ids: for each prompt.
        width: of the longest one in the call, so that every rank pads in the same way.
        first: index of the first prompt here among all of the call.
    """

    ids: tuple[tuple[int, ...], ...]
    width: int
    first: int = 0

    @property
    def rows(self) -> range:
        """The indices of the prompts among all of the call."""
        return range(self.first, self.first + len(self.ids))

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt."""
        return min(map(len, self.ids))

    def part_for(self, index: int, parts: int) -> Prompts:
        """Return the prompts of one of several ranks; consecutive ones, maybe none."""
        low, high = (len(self.ids) * place // parts for place in (index, index + 1))
        return Prompts(self.ids[low:high], self.width, self.first + low)

    def left_padded(self, device: torch.device) -> torch.Tensor:
        """Return the ids ``[rows, width]``; prompts end in the last column."""
        rows = [[PADDING_ID] * (self.width - len(ids)) + list(ids) for ids in self.ids]
        return torch.tensor(rows, dtype=torch.int64).to(device)

    def right_padded(self, device: torch.device) -> torch.Tensor:
        """Return the ids ``[rows, width]``; prompts begin in the first column."""
        rows = [list(ids) + [PADDING_ID] * (self.width - len(ids)) for ids in self.ids]
        return torch.tensor(rows, dtype=torch.int64).to(device)

    def digest(self) -> str:
        """Return a text that differs if the prompts do."""
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()[:16]


def parse_prompts(value: Any) -> Prompts:
    """
    Return the prompts in a user's value: a tensor ``[rows, length]``, or a list of lists of ids or
    of tensors ``[length]``.

    Raises:
        UsageError: it has another form, no prompt, or an empty one.
    """
    hint = "pass [[1, 2, 3], [4, 5]] or a tensor of whole numbers [rows, length]"
    if isinstance(value, torch.Tensor):
        if value.dim() != 2 or not _has_values(value):
            shape = list(value.shape)
            raise UsageError(
                f"a tensor of prompts has two dims and values, got {shape} on {value.device}",
                where=GENERATE,
                hint=hint,
            )
        value = list(value)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        kind = type(value).__name__
        raise UsageError(
            f"prompts must be lists of token ids, got {kind}", where=GENERATE, hint=hint
        )
    found = tuple(_parse_ids(index, ids, hint) for index, ids in enumerate(value))
    if not found:
        raise UsageError("there is no prompt", where=GENERATE, hint=hint)
    return Prompts(found, max(map(len, found)))


def _parse_ids(index: int, ids: Any, hint: str) -> tuple[int, ...]:
    if isinstance(ids, torch.Tensor):
        is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids.dim() != 1 or not is_whole or not _has_values(ids):
            what = f"prompt {index} is a tensor {list(ids.shape)} of {ids.dtype}"
            raise UsageError(what, where=GENERATE, hint=hint)
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        what = f"prompt {index} is a {type(ids).__name__}, not a list of token ids"
        raise UsageError(what, where=GENERATE, hint=f"{hint}; a tokenizer turns text into ids")
    for place, token in enumerate(ids):
        if type(token) is not int:
            what = f"prompt {index} has {token!r} at position {place}, not a token id"
            raise UsageError(what, where=GENERATE, hint=hint)
    if not ids:
        raise UsageError(
            f"prompt {index} is empty", where=GENERATE, hint="begin with a token, such as bos"
        )
    return tuple(ids)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def check_prompts(
    prompts: Prompts, new: int, vocabulary: int, positions: int | None, cache: int | None
) -> int:
    """
    Check prompts against the model; return the places that their caches need.

    Args:
        new: tokens to generate.
        vocabulary: number of token ids.
        positions: of the model; None: unlimited.
        cache: places that the caller wants; None: as many as needed.

    Raises:
        UsageError: an id outside of the vocabulary, a prompt that is too long, or a cache that is
            too small or has places that the model cannot use.
    """
    if type(new) is not int or new < 1:
        what = f"max_new_tokens must be a whole number from 1, got {new!r}"
        raise UsageError(what, where=GENERATE)
    for row, ids in enumerate(prompts.ids):
        for place, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise UsageError(
                    f"prompt {row} has the id {token} at position {place}, outside of the"
                    f" vocabulary of {vocabulary}",
                    where=GENERATE,
                    hint="use the tokenizer of this model",
                )
        # the last new token is not computed with
        if positions is not None and len(ids) + new - 1 > positions:
            raise UsageError(
                f"prompt {row} of {len(ids)} tokens and {new} new ones need more than the model's"
                f" {positions} positions",
                where=GENERATE,
                hint=f"shorten the prompt, or use max_new_tokens={max(0, positions + 1 - len(ids))}"
                if len(ids) <= positions
                else "shorten the prompt",
            )
    needed = prompts.width + new - 1
    if cache is None:
        return needed
    if type(cache) is not int or cache < 1:
        raise UsageError(f"cache must be a whole number from 1, got {cache!r}", where=GENERATE)
    if positions is not None and cache > max(positions, needed):
        what = f"cache={cache} has more places than the model's {positions} positions"
        raise UsageError(what, where=GENERATE, hint=f"use cache={positions} at most")
    if needed > cache:
        raise UsageError(
            f"the cache of {cache} places is at its end before max_new_tokens={new}: a prompt of"
            f" {prompts.width} tokens needs {needed}",
            where=GENERATE,
            hint=f"use cache={needed} or more, or fewer tokens",
        )
    return cache
