"""
How `pdrun.infer` loads: peak host memory beyond what was there, and CPU seconds against reading the
same slices alone.

    pdrun --devices 2 --backend cpu benchmarks/inference_load.py FOLDER

FOLDER gets a random Llama of about 200 MB as safetensors, unless it has one. Linux only.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pdrun
from pdrun.parallel.inference.load import load_weights
from pdrun.parallel.inference.sources import open_source
from pdrun.parallel.model.shards import shard_of

MIB = 1 << 20
ROUNDS = 5


def host_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def make_empty() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    with pdrun.empty_init():
        return LlamaForCausalLM(config)


def save_random(folder: Path) -> None:
    torch.manual_seed(0)
    model = make_empty()
    state = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    model.load_state_dict(state, assign=True)
    model.save_pretrained(folder, max_shard_size="50MB")


def main() -> None:
    context = pdrun.init()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if context.is_main and not folder.is_dir():
        save_random(folder)
    torch.distributed.barrier()
    served = pdrun.infer(make_empty(), mesh=pdrun.mesh(tp=-1), weights=folder)
    source = open_source(folder)
    largest = max(torch.Size(source.shape_of(name)).numel() * 4 for name in source.names())
    for turn in range(ROUNDS):
        model = make_empty()
        pdrun.strategy_for(model).apply(model, served.axes)
        names = {name: shard_of(param) for name, param in model.named_parameters()}
        own = sum(param.nbytes for param in model.parameters())
        began = time.process_time()
        slices = [source.read_shard(name, shard) for name, shard in names.items()]
        read = time.process_time() - began
        slices.clear()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
        before = host_bytes("VmRSS")
        began = time.process_time()
        load_weights(model, source, torch.device("cpu"), None)
        load = time.process_time() - began
        peak = host_bytes("VmHWM") - before
        if context.is_main:
            print(
                f"round {turn}: own {own / MIB:.1f} MiB, largest tensor {largest / MIB:.1f},"
                f" peak {peak / MIB:.1f}; load {load:.3f} CPU s, slices alone {read:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
