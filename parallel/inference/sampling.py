"""
The choice of the next token.

A sampled token depends on the logits, the seed, the index of the prompt and the position of the
token, and on nothing else: no generator has a state, so ranks cannot fall apart, and any mesh
samples what one process samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.rng.hashing import mix_bits

GENERATE = "pdrun.infer.generate"
SAMPLING_KEY = 0x67656E
"""Separates these random numbers from others of the same seed."""
MANTISSA_BITS = 53
MAX_SEED = 1 << 63
LEAST_TEMPERATURE = 1e-30
"""Below it only the most likely tokens have a probability; 0.0 in fp32 would divide by zero."""


@dataclass(frozen=True)
class Sampling:
    """
    How a token is chosen.

    Attributes:
        temperature: 0 takes the most likely token, the first of equal ones.
        top_k: only the k most likely tokens, and those that are as likely as the last of them.
        top_p: only the most likely tokens whose probabilities add up to this.
        seed: of the random numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            raise _argument_error("temperature", self.temperature, "0 (greedy) or a number above 0")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise _argument_error("top_k", self.top_k, "None or a whole number from 1")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise _argument_error("top_p", self.top_p, "None or a number above 0, up to 1")
        if type(self.seed) is not int or not -MAX_SEED <= self.seed < MAX_SEED:
            wanted = "a whole number of 64 bits, the same on every rank"
            raise _argument_error("seed", self.seed, wanted)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise UsageError(
                "temperature=0 takes the most likely token: top_k and top_p would do nothing",
                where=GENERATE,
                hint="give a temperature, or leave them out",
            )

    def choose(self, logits: torch.Tensor, rows: Sequence[int], position: int) -> torch.Tensor:
        """
        Return one token for each row.

        Args:
            logits: ``[rows, vocabulary]``.
            rows: index of each row among all prompts of the call.
            position: number of the token, counted from the end of the prompt.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        # subtracting the maximum first keeps a small temperature from overflowing
        temperature = max(self.temperature, LEAST_TEMPERATURE)
        scores = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            scores = _keep_nucleus(scores, self.top_p)
        # in the order of the vocabulary: nearly equal tokens keep their places on every mesh
        heaped = scores.softmax(-1).double().cumsum(-1)
        draws = [uniform_of(self.seed, row, position) for row in rows]
        drawn = torch.tensor(draws, dtype=torch.float64).to(logits.device)[:, None]
        found = torch.searchsorted(heaped, drawn * heaped[:, -1:], right=True)
        return found.squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def uniform_of(seed: int, row: int, position: int) -> float:
    """Return a number from 0 up to 1, without 1, for a token of a prompt."""
    bits = mix_bits(SAMPLING_KEY, seed, row, position)
    return float(bits >> (63 - MANTISSA_BITS)) / float(1 << MANTISSA_BITS)


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    likely = ordered.softmax(-1).double()
    # what comes before a token; the most likely one is always kept
    before = likely.cumsum(-1) - likely
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return scores.masked_fill(dropped, float("-inf"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _argument_error(name: str, value: Any, wanted: str) -> UsageError:
    return UsageError(f"{name} must be {wanted}, got {value!r}", where=GENERATE)
