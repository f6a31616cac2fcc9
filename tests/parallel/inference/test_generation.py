"""Generated tokens are those of one process, on any mesh; and the errors of a generation."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.inference.infer import infer
from pdrun.parallel.inference.inference_model import InferenceModel
from tests.lib.causal_models import POSITIONS, WORDS, build_causal, prompts
from tests.lib.decoder_model import build, strategy
from tests.lib.rank_pool import Worlds
from tests.lib.tiers import thorough

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("transformers", "tests.parallel.inference.test_generation")
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 7}


def serve(kind: str, degrees: dict[str, int], **options: Any) -> InferenceModel:
    devices = mesh.make_mesh(**degrees)
    if kind == "decoder":
        cut = strategy() if degrees.get("tp", 1) > 1 else None
        model = build(torch.float32, words=WORDS)
        return infer(model, mesh=devices, strategy=cut, timeout=30.0, **options)
    return infer(build_causal(kind), mesh=devices, timeout=30.0, **options)


def generate_twice(kind: str, degrees: dict[str, int]) -> tuple[Any, Any]:
    torch.manual_seed(os.getpid())  # ranks' own seeds do not matter
    served = serve(kind, degrees)
    greedy = served.generate(prompts(), 9)
    return greedy, served.generate(torch.tensor([prompts()[0]] * 5), 9, **SAMPLED)


def plain_greedy(model: Any, ids: list[int], new: int) -> list[int]:
    found = list(ids)
    with torch.inference_mode():
        for _ in range(new):
            output = model(torch.tensor([found]))
            found.append(int(getattr(output, "logits", output)[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("kind", ["llama", "llama_one_kv", "qwen2", "mistral", "gpt2", "decoder"])
def test_tokens_are_those_of_one_process_on_any_mesh(kind: str, worlds: Worlds) -> None:
    greedy, sampled = generate_twice(kind, {})
    model = build(torch.float32, words=WORDS) if kind == "decoder" else build_causal(kind)
    assert greedy == [plain_greedy(model, ids, 9) for ids in prompts()]
    assert len({tuple(row) for row in sampled}) == 5  # equal prompts, but each its own noise
    for degrees in ({"tp": 2}, {"dp": 2}):
        assert worlds(2).run(generate_twice, kind, degrees) == [(greedy, sampled)] * 2


def test_tokens_on_two_axes_are_those_of_one_process(worlds: Worlds) -> None:
    expected = generate_twice("qwen2", {})
    assert worlds(4).run(generate_twice, "qwen2", {"dp": 2, "tp": 2}) == [expected] * 4


def use_all(degrees: dict[str, int]) -> tuple[float, int, int, str]:
    served = serve("llama", degrees)
    told = served.verify(prompts())
    memory = served.memory(rows=4, length=16)
    return told.max_difference, memory.weights, memory.cache, served.explain()


def test_what_a_rank_has_and_that_it_is_right(worlds: Worlds) -> None:
    difference, weights, cache, _ = use_all({})
    assert difference == 0.0
    assert cache == 4 * 16 * 2 * 2 * 2 * 8 * 4  # rows, places, keys and values, layers, heads ...
    for told in worlds(2).run(use_all, {"tp": 2}):
        assert 0 <= told[0] < 1e-5
        assert told[1] < 0.55 * weights
        assert told[2] == cache // 2
        assert "all_reduce over tp" in told[3]


def scale_a_layer() -> None:
    served = serve("llama", {"tp": 2})
    served.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *told: told[2] * 1.01)
    served.verify(prompts())


def test_verify_finds_a_model_that_computes_something_else(worlds: Worlds) -> None:
    for kind, text in worlds(2).failures(scale_a_layer):
        assert kind == "ConfigError", text
        assert "logits differ from those of one process" in text


def sample_by_rank(what: str) -> None:
    rank = pdrun.init().rank
    served = serve("gpt2", {"tp": 2})
    ids = prompts() if what == "seed" else prompts(2 + rank)
    served.generate(ids, 4, temperature=1.0, seed=rank if what == "seed" else 0)


@pytest.mark.parametrize(("what", "text"), [("seed", "rank 1 has seed=1"), ("ids", "3 prompts")])
def test_ranks_with_their_own_arguments_are_refused(what: str, text: str, worlds: Worlds) -> None:
    kind, told = worlds(2).failure(1, sample_by_rank, what)
    assert kind == "UsageError"
    assert text in told


def die_in_decode(degrees: dict[str, int]) -> None:
    served = serve("llama", degrees)
    calls = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and pdrun.init().rank == 1:
            os._exit(3)

    served.model.register_forward_pre_hook(count)
    served.generate(prompts(4), 40)


@pytest.mark.parametrize("degrees", [{"tp": 2}, thorough({"dp": 2})], ids=str)
def test_a_rank_killed_in_decode_ends_the_others_by_peer_lost(
    degrees: dict[str, int], worlds: Worlds
) -> None:
    kind, text = worlds(2).failure(0, die_in_decode, degrees)
    assert kind == "PeerLost", text


def test_rows_end_at_eos_and_the_rest_is_unchanged() -> None:
    served = serve("llama", {})
    whole = served.generate(prompts(), 20)
    ends = whole[0][4], whole[1][11]
    for row, stopped in zip(whole, served.generate(prompts(), 20, eos=ends), strict=True):
        at = next((place for place, token in enumerate(row) if token in ends), len(row))
        assert stopped == row[: at + 1]


@pytest.fixture(scope="module")
def served() -> InferenceModel:
    return serve("gpt2", {})


def test_caches_have_the_places_that_are_asked_for(served: InferenceModel) -> None:
    assert served.generate(prompts(), 5, cache=40) == served.generate(prompts(), 5)
    with pytest.raises(UsageError, match=r"cache of 11 places is at its end.*needs 12.*cache=12"):
        served.generate(prompts(), 5, cache=11)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "there is no prompt"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, WORDS]], f"prompt 0 has the id {WORDS} at position 1, outside of the vocabulary"),
        ([[-1]], "has the id -1"),
        ([[1] * (POSITIONS + 1)], f"more than the model's {POSITIONS} positions"),
        ([[1] * POSITIONS], "use max_new_tokens=1"),
        ("text", "must be lists of token ids"),
        (["text"], "a tokenizer turns text into ids"),
        ([[1.5]], "has 1.5 at position 0"),
        ([[True]], "has True at position 0"),
        (torch.zeros(2, 2), "is a tensor"),
        (torch.zeros(2, dtype=torch.long), "has two dims"),
        (3, "must be lists of token ids"),
    ],
    ids=str,
)
def test_hostile_prompts_are_refused(ids: Any, text: str, served: InferenceModel) -> None:
    with pytest.raises(UsageError) as caught:
        served.generate(ids, 5)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1, "top_k": 0}, "top_k must be"),
        ({"temperature": 1, "top_p": 1.5}, "top_p must be"),
        ({"top_k": 5}, "top_k and top_p would do nothing"),
        ({"seed": 1.5}, "seed must be"),
        ({"eos": WORDS}, "is not an id of the vocabulary"),
        ({"eos": "x"}, "is not an id of the vocabulary"),
        ({"cache": -1}, "cache must be"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(
    options: dict[str, Any], text: str, served: InferenceModel
) -> None:
    with pytest.raises(UsageError) as caught:
        served.generate(prompts(), **{"max_new_tokens": 5, **options})
    assert text in str(caught.value)


def test_logits_that_are_not_finite_are_an_error() -> None:
    served = serve("llama", {})
    served.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(ConfigError, match="logits of prompt 0, 1, 2 are not finite"):
        served.generate(prompts(), 3, temperature=1.0)


@pytest.mark.parametrize(
    ("degrees", "axis"), [({"pp": 2}, "pp"), ({"cp": 2}, "cp"), ({"ep": 2}, "ep")], ids=str
)
def test_axes_without_inference_are_refused(
    degrees: dict[str, int], axis: str, worlds: Worlds
) -> None:
    for kind, text in worlds(2).failures(serve, "gpt2", degrees):
        assert (kind, f"does not use the axis {axis}" in text) == ("UsageError", True)


def test_models_that_cannot_generate_are_refused() -> None:
    with pytest.raises(UsageError, match="must return logits"):
        infer(NoLogits())
    with pytest.raises(UsageError, match="weights without values"):
        infer(build_causal("gpt2", empty=True))
    served = serve("gpt2", {})
    with pytest.raises(UsageError, match="already belongs"):
        infer(served.model)


class NoLogits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb(ids).sum()
