"""Generation in bf16 on several ranks: tokens are the most likely ones, up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdrun.parallel.comm import mesh
from pdrun.parallel.inference.infer import infer
from tests.lib.causal_models import build_causal, encoder_inputs, prompts_for
from tests.lib.rank_pool import Worlds
from tests.lib.tiers import thorough

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("transformers", "tests.parallel.inference.test_bf16")
NEW = 9
ROUNDING = 3e-2
"""Of logits in bf16, relative to the largest."""


def generate(kind: str, degrees: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return greedy and sampled tokens, how far logits are, and the bytes of weights."""
    served = infer(build_causal(kind), mesh=mesh.make_mesh(**degrees), dtype=dtype, timeout=30.0)
    ids, inputs = prompts_for(kind), encoder_inputs(kind)
    greedy = served.generate(ids, NEW, inputs=inputs)
    sampled = served.generate(ids, NEW, temperature=0.8, top_p=0.9, seed=3, inputs=inputs)
    told = served.verify(ids, inputs=inputs)
    return greedy, sampled, told.max_difference, served.memory().weights


def check_likely(kind: str, rows: list[list[int]]) -> None:
    """Check that no token is less likely than another one by more than rounding."""
    model = build_causal(kind).to(torch.bfloat16)
    features = (encoder_inputs(kind) or {}).get("input_features", [None] * len(rows))
    for ids, new, own in zip(prompts_for(kind), rows, features, strict=True):
        assert len(new) == NEW
        given = torch.tensor([ids + new[:-1]])
        with torch.inference_mode():
            if own is None:
                logits = model(given).logits
            else:
                inputs = own[None].to(torch.bfloat16)
                logits = model(input_features=inputs, decoder_input_ids=given).logits
        logits = logits[0, len(ids) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        short = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
        assert float(short.max()) < ROUNDING


TWO = [
    ("llama", {"tp": 2}),
    ("llama", {"dp": 2}),
    ("qwen2", {"pp": 2}),
    thorough("gpt2", {"tp": 2}),
    ("mixtral", {"ep": 2}),
    thorough("mixtral", {"tp": 2}),
    thorough("whisper", {"tp": 2}),
]
FOUR = [
    ("mixtral", {"ep": 2, "tp": 2}),
    thorough("mixtral", {"pp": 2, "ep": 2}),
    thorough("llama", {"dp": 2, "tp": 2}),
    thorough("gpt2", {"pp": 2, "tp": 2}),
]


def check(kind: str, degrees: dict[str, int], world: int, worlds: Worlds) -> None:
    _, _, _, whole = generate(kind, {})
    found = worlds(world).run(generate, kind, degrees)
    greedy, sampled, _, _ = found[0]
    check_likely(kind, greedy)
    for mine, drawn, difference, weights in found:
        assert (mine, drawn) == (greedy, sampled), "ranks fell apart"
        assert difference < ROUNDING
        assert weights <= whole
    assert all(len(row) == NEW for row in sampled)
    if set(degrees) == {"dp"}:
        assert (greedy, sampled) == generate(kind, {})[:2]


@pytest.mark.parametrize(("kind", "degrees"), TWO)
def test_two_ranks(kind: str, degrees: dict[str, int], worlds: Worlds) -> None:
    check(kind, degrees, 2, worlds)


@pytest.mark.parametrize(("kind", "degrees"), FOUR)
def test_four_ranks(kind: str, degrees: dict[str, int], worlds: Worlds) -> None:
    check(kind, degrees, 4, worlds)


def test_weights_take_half_of_the_memory() -> None:
    *_, difference, weights = generate("llama", {})
    assert difference == 0.0
    assert weights * 2 == generate("llama", {}, torch.float32)[3]
