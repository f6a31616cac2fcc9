"""
Decode on one CUDA device, one prompt in bf16: `pdrun.infer(compile=True)` on a Llama of
transformers, and a decoder written by hand as gpt-fast has it, on the same weights. In alternation,
in one call.

    python benchmarks/inference_decode_gpu.py             # 6.7 B weights
    python benchmarks/inference_decode_gpu.py --layers 8 --profile
    python benchmarks/inference_decode_gpu.py --tiny      # a trial on a CPU

The bound is the time in which the weights that a token needs are read at the memory's rate. The
time of a token is the difference of two lengths, divided by their difference in tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import pdrun

BYTES_PER_SECOND = 4.3e12
"""Of an H200, as a copy on the device measures it."""
KERNELS = 14
"""Kernels that are printed."""
Generate = Callable[[list[int], int], list[int]]


class HandBlock(nn.Module):
    """A layer with one product for queries, keys and values, and its cache."""

    def __init__(self, layer: nn.Module, config: LlamaConfig, places: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        self.wqkv = nn.Parameter(torch.cat(parts), requires_grad=False)
        self.wo, self.w1 = attention.o_proj.weight, mlp.gate_proj.weight
        self.w3, self.w2 = mlp.up_proj.weight, mlp.down_proj.weight
        self.norm1, self.norm2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.heads, self.eps = config.num_attention_heads, config.rms_norm_eps
        self.head_dim = config.hidden_size // self.heads
        shape = 1, self.heads, places, self.head_dim
        for name in ("keys", "values"):
            cache = torch.zeros(shape, dtype=self.wo.dtype, device=self.wo.device)
            self.register_buffer(name, cache)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        """Return the hidden state after the layer."""
        qkv = F.linear(normalize(x, self.norm1, self.eps), self.wqkv)
        shape = 1, x.shape[1], 3 * self.heads, self.head_dim
        q, k, v = qkv.view(shape).transpose(1, 2).chunk(3, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys[:, :, at] = k
        self.values[:, :, at] = v
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), self.wo)
        h = normalize(x, self.norm2, self.eps)
        return x + F.linear(F.silu(F.linear(h, self.w1)) * F.linear(h, self.w3), self.w2)


class HandDecoder(nn.Module):
    """gpt-fast's decoder, on the weights of a Llama of transformers."""

    def __init__(self, model: LlamaForCausalLM, places: int) -> None:
        super().__init__()
        config = model.config
        self.embedding, self.head = model.model.embed_tokens.weight, model.lm_head.weight
        self.norm, self.eps = model.model.norm.weight, config.rms_norm_eps
        self.blocks = nn.ModuleList(HandBlock(each, config, places) for each in model.model.layers)
        device = self.head.device
        rows = torch.arange(places, device=device)
        self.register_buffer("mask", rows[None] <= rows[:, None])
        cos, sin = model.model.rotary_emb(self.embedding[None, :1], rows[None])
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """Return the token after ids ``[1, columns]`` at some places."""
        x = F.embedding(ids, self.embedding)
        cos, sin, mask = self.cos[at], self.sin[at], self.mask[at]
        for block in self.blocks:
            x = block(x, cos, sin, mask, at)
        logits = F.linear(normalize(x[:, -1:], self.norm, self.eps), self.head)
        return logits[:, -1].argmax(-1)


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square norm of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with its positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def generate_by_hand(model: LlamaForCausalLM, places: int) -> Generate:
    """Return a loop over a compiled step."""
    decoder = HandDecoder(model, places)
    device = decoder.head.device
    is_cuda = device.type == "cuda"
    step = decoder
    if is_cuda:
        torch._inductor.config.coordinate_descent_tuning = True
        step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def generate(prompt: list[int], new: int) -> list[int]:
        at = torch.arange(len(prompt), device=device)
        token = decoder(torch.tensor([prompt], device=device), at)
        found = [token]
        at = at[-1:].clone()
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(new - 1):
                at += 1
                token = step(token[:, None], at).clone()
                found.append(token)
        return torch.cat(found).tolist()

    return generate


def time_call(generate: Generate, prompt: list[int], new: int) -> float:
    """Return the seconds of a call, which ends with the tokens on the host."""
    began = time.perf_counter()
    generate(prompt, new)
    return time.perf_counter() - began


def print_kernels(generate: Generate, prompt: list[int], new: int) -> None:
    """Print the time of a token by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(prompt, new)
    events = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in events)
    print(f"  {total / new / 1e3:.3f} ms in kernels per token")
    for each in events[:KERNELS]:
        micros = each.self_device_time_total / new
        print(f"    {micros:8.1f} us {each.count / new:6.1f} x {each.key[:100]}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--places", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a token")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a trial on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(num_hidden_layers=options.layers, max_position_embeddings=2048)
    if options.tiny:
        config = LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        options.new, options.places, options.rounds = 12, 32, 2
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    needed = sum(param.nbytes for param in model.parameters())
    needed -= model.model.embed_tokens.weight.nbytes  # one row of it is read
    bound = needed / BYTES_PER_SECOND
    by_hand = generate_by_hand(model, options.places)
    served = pdrun.infer(model, compile=device.type == "cuda")

    def by_pdrun(prompt: list[int], new: int) -> list[int]:
        return served.generate([prompt], new, cache=options.places)[0]

    prompt = torch.randint(3, config.vocab_size, (16,)).tolist()
    rows: dict[str, Generate] = {"by hand": by_hand, "pdrun": by_pdrun}
    few = 8
    outputs = {}
    for name, generate in rows.items():
        began = time.perf_counter()
        for _ in range(3):
            outputs[name] = generate(prompt, options.new)
        print(f"{name}: three first calls took {time.perf_counter() - began:.1f} s", flush=True)
    pairs = zip(*outputs.values(), strict=True)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), options.new)
    print(f"the first {same} of {options.new} tokens are equal")
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    calls: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, generate in rows.items():
            whole = time_call(generate, prompt, options.new)
            short = time_call(generate, prompt, few)
            seconds[name].append((whole - short) / (options.new - few))
            calls[name].append(options.new / whole)
    print(f"bound: {bound * 1e3:.3f} ms per token, {needed:,} bytes at 4.3 TB/s")
    hand = statistics.median(seconds["by hand"])
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(
            f"{name:8} {middle * 1e3:.3f} ms per token ({min(each) * 1e3:.3f} to"
            f" {max(each) * 1e3:.3f}), {bound / middle:.3f} of the bound, {hand / middle:.3f} of"
            f" by hand; {statistics.median(calls[name]):.1f} tokens/s with the prompt",
            flush=True,
        )
    if options.profile and device.type == "cuda":
        for name, generate in rows.items():
            print(name)
            print_kernels(generate, prompt, 40)


if __name__ == "__main__":
    main()
