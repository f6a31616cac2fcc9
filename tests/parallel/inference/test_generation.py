"""Generated tokens are those of one process, on any mesh; and the errors of a generation."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.inference import compiled_decode
from pdrun.parallel.inference.infer import infer
from pdrun.parallel.inference.inference_model import InferenceModel
from tests.lib.causal_models import (
    POSITIONS,
    WORDS,
    build_causal,
    encoder_inputs,
    prompts,
    prompts_for,
)
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
    ids = prompts_for(kind)
    greedy = served.generate(ids, 9, inputs=encoder_inputs(kind))
    same = torch.tensor([ids[0]] * 5)
    return greedy, served.generate(same, 9, **SAMPLED, inputs=encoder_inputs(kind, 5))


def plain_greedy(model: Any, ids: list[int], new: int, features: Any = None) -> list[int]:
    found = list(ids)
    with torch.inference_mode():
        for _ in range(new):
            row = torch.tensor([found])
            if features is None:
                output = model(row)
            else:
                output = model(input_features=features[None], decoder_input_ids=row)
            found.append(int(getattr(output, "logits", output)[0, -1].argmax()))
    return found[len(ids) :]


MESHES: dict[str, tuple[dict[str, int], ...]] = {
    "mixtral": ({"tp": 2}, {"ep": 2}),
    "qwen2": ({"tp": 2}, {"dp": 2}, {"pp": 2}),
    "gpt2": ({"tp": 2}, {"pp": 2}),
    "mistral": ({"dp": 2}, {"pp": 2}),
}
"""Of models with other axes than dp and tp."""


@pytest.mark.parametrize(
    "kind",
    ["llama", "llama_one_kv", "qwen2", "mistral", "mixtral", "gpt2", "whisper", "decoder"],
)
def test_tokens_are_those_of_one_process_on_any_mesh(kind: str, worlds: Worlds) -> None:
    greedy, sampled = generate_twice(kind, {})
    model = build(torch.float32, words=WORDS) if kind == "decoder" else build_causal(kind)
    features = (encoder_inputs(kind) or {}).get("input_features", [None] * 3)
    expected = [
        plain_greedy(model, ids, 9, own)
        for ids, own in zip(prompts_for(kind), features, strict=True)
    ]
    assert greedy == expected
    assert len({tuple(row) for row in sampled}) == 5  # equal prompts, but each its own noise
    for degrees in MESHES.get(kind, ({"tp": 2}, {"dp": 2})):
        assert worlds(2).run(generate_twice, kind, degrees) == [(greedy, sampled)] * 2


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("qwen2", {"dp": 2, "tp": 2}),
        ("mixtral", {"pp": 2, "ep": 2}),
        thorough("mixtral", {"ep": 2, "tp": 2}),
        thorough("gpt2", {"pp": 2, "tp": 2}),
        thorough("whisper", {"dp": 2, "tp": 2}),
    ],
)
def test_tokens_on_two_axes_are_those_of_one_process(
    kind: str, degrees: dict[str, int], worlds: Worlds
) -> None:
    expected = generate_twice(kind, {})
    assert worlds(4).run(generate_twice, kind, degrees) == [expected] * 4


def build_odd(kind: str) -> Any:
    """Return a model of transformers whose static cache does not keep padding apart."""
    torch.manual_seed(0)
    if kind == "gpt_neo":
        sizes = {"num_layers": 2, "num_heads": 4, "window_size": 5, "intermediate_size": 48}
        kinds = [[["global", "local"], 1]]
        config = transformers.GPTNeoConfig(
            vocab_size=WORDS, hidden_size=32, attention_types=kinds, **sizes
        )
        model = transformers.GPTNeoForCausalLM(config)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=WORDS, **sizes))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


@pytest.mark.parametrize("kind", ["gpt_neo", thorough("mamba")])
def test_caches_that_mix_rows_are_not_used(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_odd(kind)
    expected = [plain_greedy(model, ids, 9) for ids in prompts()]
    served = infer(model)
    assert "each token computes its full sequence" in capfd.readouterr().err
    assert served.generate(prompts(), 9) == expected
    assert "cache: none" in served.explain()
    with pytest.raises(UsageError, match="logits with caches differ from those of full sequences"):
        infer(build_odd(kind), compile=True)


def generate_unevenly(degrees: dict[str, int]) -> Any:
    """Generate for one prompt, then for rows that end at different times."""
    served = serve("mixtral", degrees)
    one = served.generate(prompts(1), 5)
    whole = served.generate(prompts(2), 40)
    return one, whole, served.generate(prompts(2), 40, eos=whole[0][3])


def test_ranks_of_experts_compute_together_whatever_rows_they_have(worlds: Worlds) -> None:
    expected = generate_unevenly({})
    assert len(expected[2][0]) == 4 < len(expected[2][1])
    assert worlds(2).run(generate_unevenly, {"ep": 2}) == [expected] * 2


def layouts_of(kind: str, degrees: dict[str, int]) -> tuple[dict[str, Any], float]:
    served = serve(kind, degrees)
    parts = {name: (one.shape, one.ranges) for name, one in served.layout().items()}
    return parts, served.verify(prompts()).max_difference


def test_layouts_together_cover_each_weight(worlds: Worlds) -> None:
    """Experts are cut, too, and a stage has its layers, the first one the embedding."""
    full, _ = layouts_of("mixtral", {})
    shape = full["model.layers.0.mlp.experts.down_proj"][0]
    assert shape[0] == 4
    for rank, (parts, difference) in enumerate(worlds(2).run(layouts_of, "mixtral", {"tp": 2})):
        assert difference < 1e-5
        assert parts.keys() == full.keys()
        ranges = parts["model.layers.0.mlp.experts.down_proj"][1]
        assert ranges[0] == ((2 * rank, 2 * rank + 2),)
    (first, _), (last, _) = worlds(2).run(layouts_of, "mixtral", {"pp": 2})
    assert {**first, **last} == full
    assert set(first) & set(last) == {"model.norm.weight"}
    assert "model.embed_tokens.weight" in first
    assert "model.layers.1.mlp.gate.weight" in last


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


@pytest.mark.parametrize("degrees", [{"tp": 2}, thorough({"dp": 2}), thorough({"pp": 2})], ids=str)
def test_a_rank_killed_in_decode_ends_the_others_by_peer_lost(
    degrees: dict[str, int], worlds: Worlds
) -> None:
    kind, text = worlds(2).failure(0, die_in_decode, degrees)
    assert kind == "PeerLost", text
    assert text.startswith("pdrun.infer: ")


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
        ([torch.zeros(2, dtype=torch.complex64)], "is a tensor"),
        (torch.zeros(0, 3, dtype=torch.long), "there is no prompt"),
        (torch.zeros(1, 3, dtype=torch.long, device="meta"), "two dims and values, got [1, 3] on"),
        ([torch.zeros(3, dtype=torch.long).to_sparse()], "is a tensor"),
        ([[2**80]], "outside of the vocabulary"),
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
        ({"temperature": 1, "seed": 1 << 63}, "seed must be a whole number of 64 bits"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"eos": 1.5}, "eos=1.5: 1.5 is not an id"),
        ({"eos": True}, "eos=True: True is not an id"),
        ({"eos": torch.tensor(2)}, "is not an id of the vocabulary"),
        ({"cache": POSITIONS + 1}, f"more places than the model's {POSITIONS} positions"),
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


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-6])
def test_next_to_no_temperature_takes_the_most_likely_token(
    temperature: float, served: InferenceModel
) -> None:
    expected = served.generate(prompts(), 6)
    assert served.generate(prompts(), 6, temperature=temperature) == expected


def test_counts_of_memory_are_checked(served: InferenceModel) -> None:
    wrong: Any
    for wrong in (0, -1, "4", True):
        with pytest.raises(UsageError, match="rows must be a whole number from 1"):
            served.memory(rows=wrong)
        with pytest.raises(UsageError, match="length must be a whole number from 1"):
            served.memory(length=wrong)


class Masked(torch.nn.Module):
    """Has logits of -inf for tokens that it never chooses; for token 0, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(9, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        never = (torch.arange(9) > 4) | (ids == 0).unsqueeze(-1)
        return self.emb(ids).masked_fill(never, float("-inf"))


def test_a_model_can_mask_tokens_but_not_all_of_them() -> None:
    masked = infer(Masked())
    rows = masked.generate([[1], [2]], 1, temperature=5.0)
    assert all(token <= 4 for row in rows for token in row)
    with pytest.raises(ConfigError, match="logits of prompt 1 are not finite"):
        masked.generate([[1], [0]], 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": torch.float8_e4m3fn}, "dtype must be one of torch.float64, torch.float32"),
        ({"weights": 3}, "weights must be a path, got int"),
        ({"weights": ["a"]}, "weights must be a path, got list"),
        ({"timeout": float("inf")}, "timeout must be above 0 and at most"),
        ({"max_length": 0}, "max_length must be"),
        ({"compile": 1}, "compile must be True or False"),
    ],
    ids=str,
)
def test_wrong_arguments_of_infer(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        infer(build_causal("gpt2"), **options)
    assert text in str(caught.value)


def test_experts_with_a_capacity_are_refused() -> None:
    """What they drop would depend on how long a sequence has become."""
    model = torch.nn.Sequential(torch.nn.Embedding(9, 16), pdrun.MoE(16, 9, experts=2, capacity=1))
    with pytest.raises(UsageError, match=r"1: capacity=1 counts the tokens of a sequence"):
        infer(model)


def test_logits_that_are_not_finite_are_an_error() -> None:
    served = serve("llama", {})
    served.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(ConfigError, match="logits of prompt 0, 1, 2 are not finite"):
        served.generate(prompts(), 3, temperature=1.0)


@pytest.mark.parametrize(
    ("kind", "degrees", "message"),
    [
        ("gpt2", {"cp": 2}, "does not use the axis cp"),
        ("gpt2", {"ep": 2}, "GPT2LMHeadModel has no experts to cut over ep"),
        ("decoder", {"pp": 2}, "has no list of layers that is known"),
        ("whisper", {"pp": 2}, "has no list of layers that is known"),
    ],
)
def test_meshes_that_a_model_cannot_have_are_refused(
    kind: str, degrees: dict[str, int], message: str, worlds: Worlds
) -> None:
    for error, text in worlds(2).failures(serve, kind, degrees):
        assert (error, message in text) == ("UsageError", True), text


def serve_uncut(degrees: dict[str, int]) -> None:
    idle = pdrun.Strategy({"head": pdrun.replicate()})
    infer(build(torch.float32, words=WORDS), mesh=mesh.make_mesh(**degrees), strategy=idle)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_an_axis_that_cuts_nothing_is_refused(axis: str, worlds: Worlds) -> None:
    for error, text in worlds(2).failures(serve_uncut, {axis: 2}):
        assert error == "UsageError"
        assert f"the strategy cuts no weight over {axis}, which would have no effect" in text


@pytest.mark.parametrize(
    ("ids", "inputs", "message"),
    [
        ([[1], [2]], None, "has an encoder and needs inputs="),
        ([[1], [2]], 3, "inputs must be tensors by name"),
        ([[1], [2]], {"input_features": [1.0]}, "inputs must be tensors by name"),
        ([[1], [2]], {"features": torch.ones(2)}, "has the unknown name features"),
        ([[1], [2]], {}, "has no input_features"),
        ([[1], [2]], {"input_features": torch.ones(3, 8, 40)}, "has 3 rows for 2 prompts"),
        ([[1], [2, 3]], {"input_features": torch.ones(2, 8, 40)}, "prompts of one length"),
    ],
)
def test_hostile_inputs_of_an_encoder_are_refused(ids: Any, inputs: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        serve("whisper", {}).generate(ids, 2, inputs=inputs)
    assert message in str(caught.value)


def test_inputs_need_an_encoder(served: InferenceModel) -> None:
    with pytest.raises(UsageError, match="has no encoder"):
        served.generate([[1]], 2, inputs={"input_features": torch.ones(1)})


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


def generate_compiled(degrees: dict[str, int], backend: str) -> Any:
    """Return tokens of a compiled decode, and of a second call that compiles nothing."""
    compiled_decode.CPU_BACKEND = backend
    served = serve("llama", degrees, compile=True)
    first = served.generate(prompts(), 9)
    counters = torch._dynamo.utils.counters
    compiled = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    again = served.generate(prompts(), 9)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    return first, again, breaks


@pytest.mark.parametrize("backend", ["aot_eager", thorough("inductor")])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, thorough({"pp": 2})], ids=str)
def test_a_compiled_decode_has_the_tokens_of_an_eager_one(
    degrees: dict[str, int], backend: str, worlds: Worlds
) -> None:
    expected = serve("llama", {}).generate(prompts(), 9)
    parts = max(degrees.values(), default=1)
    for first, again, breaks in worlds(parts).run(generate_compiled, degrees, backend):
        assert first == again == expected
        assert "pp" in degrees or not breaks


def test_layers_with_a_window_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_decode, "CPU_BACKEND", "eager")
    expected = serve("mistral", {}).generate(prompts(), 9)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = serve("mistral", {}, compile=True)
    assert [compiled.generate(prompts(), 9) for _ in range(2)] == [expected] * 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(UsageError, match="compile=True is not supported for"):
        serve("decoder", {}, compile=True)
