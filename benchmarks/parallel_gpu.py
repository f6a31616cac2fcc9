"""
Train a 1.35 B decoder on 1 to 4 GPUs: hand-written torch and pdrun, on the same work in one
command, compiled on both sides.

    python benchmarks/parallel_gpu.py --devices 4                    # data axes
    python benchmarks/parallel_gpu.py --devices 2 --rows ddp,pdrun0  # some rows
    python benchmarks/parallel_gpu.py --devices 2 --tokens 32768 --rows tp-async,pdrun-tp,pipe
    python benchmarks/parallel_gpu.py --devices 1 --tokens 32768 --rows pdrun0,pdrun0-fp8,fsdp2-fp8
    python benchmarks/parallel_gpu.py --tiny --devices 2 --backend cpu --rows ddp-eager,pdrun0-eager

    ddp, zero1, fsdp2   DistributedDataParallel, with ZeroRedundancyOptimizer; fully_shard
    tp                  torch's parallelize_module with sequence parts, loss_parallel, autocast
    tp-bf16, tp-async   the same with weights in bf16 (fully_shard over one rank), and with torch's
                        asynchronous tensor parallel (_micro_pipeline_tp)
    fsdp-tp             the same over pairs, and fully_shard over the pairs (4 devices)
    pipe                torch's pipelining, 1F1B, one stage per device, 8 micro-batches
    hf                  LlamaForCausalLM of transformers, fully_shard
    pdrun0, 1, 3        pdrun at these levels
    pdrun-tp, pdrun-fsdp-tp, pdrun-pipe, pdrun-hf   the same sharding with pdrun
    pdrun-zb            pdrun-pipe with the schedule zero-bubble

Blocks are compiled on both sides. A row's name can end with

    -eager              nothing is compiled
    -balanced           stages of 13 and 11 blocks, not 12 and 12, for the head (pipe, zb)
    -fused              head and loss by pdrun.linear_cross_entropy (pdrun0, 1, 3, hf)
    -nccl               flat buffers and messages by NCCL, not by copies (pdrun)
    -fp8, -fp8row       products of the blocks in fp8, a scale per tensor, or per row; for fsdp2
                        by torchao, with its recipes tensorwise and rowwise_with_gw_hp
    -full, -selective   recomputed blocks (pdrun)
    -offload            optimizer state and activations on the host (pdrun)
    -copies             two copies of a step, one computes while the other waits (pdrun)

A row takes about a minute. A step has 65,536 tokens in bf16, AdamW with fused kernels. Each row
runs in separate processes. Peak is the maximum that torch's allocator has allocated on any rank;
for pdrun the peak that `run.memory` predicts is printed, too. MFU counts 6 operations per weight
and token, and for attention 12 per layer, width, position and token, halved since it is causal.
The last columns are milliseconds of a step's kernels on rank 0, of two steps under torch's
profiler: matrix products, attention, communication, communication while nothing computes, other
kernels, and none.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pdrun
from pdrun.parallel.comm import sharded as sharded_module
from pdrun.parallel.comm.p2p import messages

GIB = 2**30
RECIPES = {"fp8": ("tensor", "tensorwise"), "fp8row": ("row", "rowwise_with_gw_hp")}
"""Ends of rows: scales of pdrun, and recipes of torchao."""
RECOMPUTES = ("full", "selective")
SUFFIXES = ("balanced", "eager", "fused", "nccl", "copies", "offload", *RECOMPUTES, *RECIPES)
PRODUCT_KERNELS = ("gemm", "nvjet", "cutlass", "xmma", "cublas")
ATTENTION_KERNELS = ("flash", "fmha", "sdpa", "attention")
COPY_KERNELS = ("PtoP", "Peer")
KERNELS = ("products", "attention", "network", "exposed", "rest", "idle")
PROFILED_STEPS = 2
MOST_KERNELS = 40
MICRO_BATCHES = 8
"""Of the rows with stages."""
Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the decoder and of a step."""

    width: int = 2048
    hidden: int = 5504
    layers: int = 24
    heads: int = 16
    words: int = 32000
    length: int = 2048
    tokens: int = 65536
    peak: float = 989e12
    """Operations a second and device in bf16, dense (H100 SXM)."""

    @property
    def weights(self) -> int:
        """Number of trained elements."""
        return self.layers * (self.width * (4 * self.width + 3 * self.hidden + 2)) + self.width * (
            2 * self.words + 1
        )

    @property
    def operations(self) -> float:
        """Operations per token, forward and backward."""
        return 6 * self.weights + 6 * self.layers * self.width * self.length


WIDE = Size(width=4096, hidden=11008, layers=8, heads=32)
TINY = Size(width=64, hidden=160, layers=4, heads=4, words=128, length=32, tokens=512, peak=1e12)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Causal, with rotary positions; one matrix for q, k and v."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.n_heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.proj = nn.Linear(size.width, size.width, bias=False)

    def split(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class SplitQKVAttention(Attention):
    """Three matrices, since DTensors cannot shard a fused one; made by `split_qkv`."""

    wq: nn.Linear
    wk: nn.Linear
    wv: nn.Linear

    def split(self, x: Tensor) -> Any:
        return [
            w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        ]


def split_qkv(attention: Attention) -> None:
    """Give an attention separate matrices for q, k and v."""
    parts = attention.qkv.weight.detach().chunk(3)
    attention.__class__ = SplitQKVAttention
    del attention.qkv
    for name, part in zip(("wq", "wk", "wv"), parts, strict=True):
        linear = nn.Linear(part.shape[1], part.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(part.clone())
        setattr(attention, name, linear)


class Perceptron(nn.Module):
    """A gated perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then a perceptron; each adds to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attn, self.mlp = Attention(size), Perceptron(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens in, logits of the next token out, or what the head gets."""

    ends_before_head = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.emb = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)
        half = size.width // size.heads // 2
        angle = torch.arange(size.length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", angle.sin().to(torch.bfloat16), persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        h = self.norm(h)
        return h if self.ends_before_head else self.head(h)


def plain_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def llama_loss(output: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return output.loss


def total_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return pdrun.cross_entropy(logits, batch[1], reduction="sum"), batch[1].numel()


def fused_forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    h, y = model(batch[0]), batch[1]
    return pdrun.linear_cross_entropy(h, model.head, y, reduction="sum"), y.numel()


# ---- hand-written -----------------------------------------------------------


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def compile_blocks(row: str, blocks: Any) -> None:
    if not row.endswith("-eager"):
        for block in blocks:
            block.compile()


def data_parallel_step(row: str, model: nn.Module, device: torch.device) -> Step:
    """Return a step of DDP, DDP with ZeRO-1, or FSDP2."""
    autocast = not row.startswith("fsdp2")
    for end in RECIPES.keys() & set(split_name(row)[1]):
        convert_to_fp8(model.blocks, RECIPES[end][1])
    compile_blocks(row, model.blocks)
    if autocast:
        ids = [device.index] if device.type == "cuda" else None
        wrapped: nn.Module = DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
        kinds = {"lr": 1e-4, "fused": True}
        optimizer: Any = adam(wrapped.parameters())
        if row.startswith("zero1"):
            optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **kinds)
    else:
        wrapped = sharded(model)
        optimizer = adam(wrapped.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = plain_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def convert_to_fp8(blocks: nn.Module, recipe: str) -> None:
    """Have torchao's linear modules take the place of those of the blocks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=Float8LinearConfig.from_recipe_name(recipe))


def sharded(model: nn.Module, blocks: Any = None, **options: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks if blocks is None else blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def tensor_parallel_step(row: str, model: nn.Module, device: torch.device) -> Step:
    """
    Return a step of torch's tensor parallel with sequence parallel; fsdp-tp: over pairs, and
    sharded over the pairs.
    """
    world = dist.get_world_size()
    tp = 2 if row.startswith("fsdp") else world
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if "async" in row:
        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    part, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "emb": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=part, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        split_qkv(block.attn)
        block.attn.n_heads //= tp
        parallelize_module(
            block,
            mesh["tp"],
            {
                "norm1": SequenceParallel(),
                "norm2": SequenceParallel(),
                "attn": PrepareModuleInput(
                    input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)
                ),
                "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
                "attn.wq": ColwiseParallel(),
                "attn.wk": ColwiseParallel(),
                "attn.wv": ColwiseParallel(),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "attn.proj": RowwiseParallel(output_layouts=part),
                "mlp.down": RowwiseParallel(output_layouts=part),
            },
        )
        if not row.endswith("-eager"):
            block.compile()
    shards = world > tp or "bf16" in row or "async" in row
    if shards:
        sharded(model, mesh=mesh["dp"])
    optimizer = adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        with loss_parallel():
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not shards):
                loss = plain_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor()

    return step


def stage_of(block: int, blocks: int, stages: int, balanced: bool) -> int:
    """Return the stage of a block; balanced: head and loss of the last stage count as two."""
    return block * stages // (blocks + 2 if balanced else blocks)


class Stage(nn.Module):
    """A rank's layers."""

    def __init__(self, model: Decoder, index: int, count: int, balanced: bool) -> None:
        super().__init__()
        total = len(model.blocks)
        mine = [place for place in range(total) if stage_of(place, total, count, balanced) == index]
        low, high = mine[0], mine[-1] + 1
        self.emb = model.emb if index == 0 else nn.Identity()
        self.blocks = model.blocks[low:high]
        self.last = nn.Sequential(model.norm, model.head) if index == count - 1 else nn.Identity()
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return self.last(h)


def pipeline_step(row: str, model: nn.Module, device: torch.device) -> Step:
    """Return a step of torch's pipelining, 1F1B."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = Stage(model, rank, world, "balanced" in row)
    compile_blocks(row, stage.blocks)
    optimizer = adam(stage.parameters())
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, device), MICRO_BATCHES, loss_fn=plain_loss
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with torch.autocast(device.type, dtype=torch.bfloat16):
            schedule.step(
                *([x] if rank == 0 else []),
                **({"target": y, "losses": losses} if rank == world - 1 else {}),
            )
        optimizer.step()
        optimizer.zero_grad()
        found = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        dist.broadcast(found, src=world - 1)
        return found

    return step


def llama_step(row: str, model: nn.Module, device: torch.device) -> Step:
    """Return a step of a model of the transformers library, with FSDP2."""
    compile_blocks(row, model.model.layers)
    wrapped = sharded(model, model.model.layers)
    optimizer = adam(wrapped.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = wrapped(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_llama(size: Size) -> nn.Module:
    """Return the decoder of the same size of the transformers library."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=size.width,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            vocab_size=size.words,
            max_position_embeddings=size.length,
            attn_implementation="sdpa",
        )
    )


HAND = {
    "ddp": data_parallel_step,
    "zero1": data_parallel_step,
    "fsdp2": data_parallel_step,
    "tp": tensor_parallel_step,
    "tp-bf16": tensor_parallel_step,
    "tp-async": tensor_parallel_step,
    "fsdp-tp": tensor_parallel_step,
    "pipe": pipeline_step,
    "hf": llama_step,
}


# ---- pdrun ------------------------------------------------------------------


def megatron_strategy() -> pdrun.Strategy:
    """Return Megatron's sharding with sequence parallel, logits sharded over the vocabulary."""
    col, row, seq, vocab = pdrun.col, pdrun.row, pdrun.seq, pdrun.vocab
    return pdrun.Strategy(
        {
            "emb|head": vocab("tp", gather=False, sequence=1),
            "blocks.*.attn": pdrun.heads("tp"),
            "blocks.*.attn.w?": col("tp", sequence=1),
            "blocks.*.mlp.gate|blocks.*.mlp.up": col("tp", sequence=1),
            "blocks.*.attn.proj|blocks.*.mlp.down": row("tp", sequence=1),
            "norm|blocks.*.norm?": seq("tp"),
        }
    )


def pdrun_step(
    row: str, model: nn.Module, size: Size, options: dict[str, Any]
) -> tuple[pdrun.Run, Step]:
    """Return a run for the row's name, and its step."""
    world = dist.get_world_size()
    kind, ends = split_name(row)
    kind = kind.removeprefix("pdrun").removeprefix("-")
    options = {"copies": 2, **options} if "copies" in ends else dict(options)
    loss: Any = total_loss
    if "fused" in ends and kind != "hf":
        model.ends_before_head = True
        loss, options["forward"] = None, fused_forward
    if kind in "0123" or kind == "hf":
        level = 3 if kind == "hf" else int(kind)
        options |= {"optimizer_level": level, "dataset_strategy": "data_parallel"}
    elif kind in ("pipe", "zb"):
        schedule = "zero-bubble" if kind == "zb" else "1f1b"
        stages = {"emb": 0, "norm": world - 1, "head": world - 1} | {
            f"blocks.{place}": stage_of(place, size.layers, world, "balanced" in ends)
            for place in range(size.layers)
        }
        options |= {
            "mesh": pdrun.mesh(pp=world),
            "pipeline": pdrun.Pipeline(MICRO_BATCHES, schedule=schedule, stages=stages),
        }
    else:
        tp, level = (2, 3) if kind == "fsdp-tp" else (world, 0)
        for block in model.blocks:  # as by_tensors has it: the same model
            split_qkv(block.attn)
        options |= {
            "mesh": pdrun.mesh(dp=-1, tp=tp),
            "strategy": megatron_strategy(),
            "optimizer_level": level,
        }
        options |= {"dataset_strategy": "data_parallel"}
    if kind == "hf":
        loss = llama_loss
        if "fused" in ends:
            pdrun.fuse_head_loss(model)
        options["forward"] = lambda model, batch: model(
            input_ids=batch[0], labels=batch[0], use_cache=False
        )
    if "nccl" in ends:  # no buffer is as large as that
        sharded_module.MIN_SHARD_BYTES = messages.MIN_MESSAGE_BYTES = 1 << 60
    precision: Any = "bf16"
    for end in RECIPES.keys() & set(ends):
        precision = pdrun.Fp8(RECIPES[end][0])
    for end in set(RECOMPUTES) & set(ends):
        options["recompute"] = end
    if "offload" in ends:
        options["offload"] = "all"
    run = pdrun.parallelize(
        model,
        functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
        loss,
        precision=precision,
        exact=False,
        compile="eager" not in ends,
        **options,
    )
    return run, lambda x, y: run.step((x, y))


def split_name(row: str) -> tuple[str, list[str]]:
    """Return a row's name without its endings, and these."""
    ends = []
    while (end := row.rpartition("-")[2]) in SUFFIXES:
        ends.append(end)
        row = row.removesuffix(f"-{end}")
    return row, ends


def count_repeats(row: str, world: int) -> int:
    """Return how many ranks compute the same rows."""
    if "fsdp-tp" in row:
        return 2
    return world if any(part in row for part in ("tp", "pipe", "zb")) else 1


# ---- kernels ----------------------------------------------------------------


def profile_steps(
    step: Callable[[], Any], on_gpu: bool
) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """
    Return the milliseconds of a step's kernels by kind, and by name, longest first; empty without
    a GPU.
    """
    if not on_gpu:
        return {}, []
    wait(on_gpu)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
    kinds: dict[str, list[tuple[int, int]]] = {}
    names: dict[str, float] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            low = event.start_ns()
            kinds.setdefault(kind_of(event.name()), []).append((low, low + event.duration_ns()))
            spent_before = names.get(event.name(), 0.0)
            names[event.name()] = spent_before + event.duration_ns() / PROFILED_STEPS / 1e6
    ms = {kind: sum(high - low for low, high in spans) for kind, spans in kinds.items()}
    compute = [span for kind, spans in kinds.items() if kind != "network" for span in spans]
    busy = covered(compute)
    everything = covered([*compute, *kinds.get("network", [])])
    ms |= {"exposed": everything - busy, "idle": spent * 1e9 - everything}
    by_kind = {kind: value / PROFILED_STEPS / 1e6 for kind, value in ms.items()}
    return by_kind, sorted(names.items(), key=lambda pair: -pair[1])


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel's name."""
    if "nccl" in kernel or any(part in kernel for part in COPY_KERNELS):
        return "network"
    if any(part in kernel for part in ATTENTION_KERNELS):
        return "attention"
    return "products" if any(part in kernel for part in PRODUCT_KERNELS) else "rest"


def covered(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of (start, end)."""
    total = end = 0
    for low, high in sorted(spans):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def measure_row(
    row: str, size: Size, warm: int, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Return tokens per second, peak and losses of one row; runs on every rank."""
    warnings.filterwarnings("ignore")
    context = pdrun.init()
    device = torch.device(context.device)
    torch.manual_seed(0)
    with device:
        model = make_llama(size) if split_name(row)[0] in ("hf", "pdrun-hf") else Decoder(size)
    same = count_repeats(row, context.world_size)
    torch.manual_seed(1 + context.rank // same)
    rows = size.tokens // (context.world_size // same) // size.length
    x, y = torch.randint(size.words, (2, rows, size.length), device=device)
    predicted = 0
    if row.startswith("pdrun"):
        run, step = pdrun_step(row, model, size, options)
        predicted = 0 if run.mesh.pp > 1 else run.memory((x, y)).peak
    else:
        step = HAND[split_name(row)[0]](row, model, device)
    on_gpu = device.type == "cuda"
    losses = [step(x, y) for _ in range(warm)]
    wait(on_gpu)
    begin = time.perf_counter()
    losses += [step(x, y) for _ in range(steps)]
    wait(on_gpu)
    spent = (time.perf_counter() - begin) / steps
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    mine = torch.stack(
        [
            torch.as_tensor(getattr(loss, "loss", loss), device=device)
            for loss in (losses[0], losses[-1])
        ]
    )
    dist.all_reduce(mine)
    first, last = (mine / context.world_size).tolist()
    found = {"seconds": spent, "peak": peak, "predicted": predicted, "first": first, "last": last}
    kinds, names = profile_steps(lambda: step(x, y), on_gpu)
    return found | {"kernels": kinds, "names": names[:MOST_KERNELS]}


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare pdrun with hand-written torch on GPUs.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", default="ddp,pdrun0,zero1,pdrun1,fsdp2,pdrun3")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, help="a step")
    parser.add_argument("--fusion", type=float, help="MiB a transfer, for pdrun")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--wide", action="store_true", help="8 layers of width 4096")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of a row")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    size = TINY if args.tiny else WIDE if args.wide else Size()
    size = replace(size, tokens=args.tokens) if args.tokens else size
    options = {"comm_fusion": args.fusion} if args.fusion else {}
    print(
        f"torch {torch.__version__}, {args.devices} devices, {size.weights / 1e9:.3f} B weights,"
        f" {asdict(size)}"
    )
    print(
        f"{'row':16} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9} {'predicted':>9}"
        f" {'first loss':>10} {'last':>8} {'ms':>7} " + " ".join(f"{name:>9}" for name in KERNELS)
    )
    for row in args.rows.split(","):
        try:
            told = pdrun.launch(
                measure_row,
                row,
                size,
                args.warm,
                args.steps,
                options,
                devices=args.devices,
                backend=args.backend,
            )
        except Exception as error:
            print(f"{row:16} {error}")  # out of memory, say: the other rows are worth having
            continue
        speed = size.tokens / told[0]["seconds"]
        used = speed * size.operations / size.peak / args.devices
        sizes = f"{max(rank['peak'] for rank in told) / GIB:9.2f} {told[0]['predicted'] / GIB:9.2f}"
        print(
            f"{row:16} {speed:10,.0f} {used:6.3f} {sizes} {told[0]['first']:10.4f}"
            f" {told[0]['last']:8.4f} {told[0]['seconds'] * 1e3:7.1f} "
            + " ".join(f"{told[0]['kernels'].get(name, 0.0):9.1f}" for name in KERNELS),
            flush=True,
        )
        for name, ms in told[0]["names"][: args.kernels]:
            print(f"    {ms:8.2f} ms  {name[:150]}")


if __name__ == "__main__":
    main()
