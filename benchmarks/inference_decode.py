"""
Decode of `pdrun.infer` against a loop written by hand on the same model: CPU seconds of 64 tokens,
in alternation, eager; and compiled, if asked for.

    python benchmarks/inference_decode.py [--compile]
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import pdrun

NEW = 64
ROUNDS = 9
PROMPTS = 4
WIDTH = 16


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def decode_by_hand(model: LlamaForCausalLM, ids: torch.Tensor) -> list[list[int]]:
    with torch.inference_mode():
        cache = StaticCache(config=model.config, max_cache_len=WIDTH + NEW - 1)
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        chosen = []
        for place in range(NEW):
            tokens = logits.argmax(-1)
            chosen.append(tokens)
            if place + 1 < NEW:
                output = model(input_ids=tokens[:, None], past_key_values=cache, logits_to_keep=1)
                logits = output.logits[:, -1]
        return torch.stack(chosen, 1).tolist()


def cpu_seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (PROMPTS, WIDTH), generator=generator)
    served = pdrun.infer(copy.deepcopy(model), compile="--compile" in sys.argv)
    assert served.generate(ids, NEW) == decode_by_hand(model, ids)
    rounds = [
        (
            cpu_seconds(lambda: decode_by_hand(model, ids)),
            cpu_seconds(lambda: served.generate(ids, NEW)),
        )
        for _ in range(ROUNDS)
    ]
    hand, ours = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(own / other for other, own in rounds)
    print(f"by hand {hand:.3f} CPU s, pdrun {ours:.3f} CPU s, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
