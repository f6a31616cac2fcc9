"""
Python source, byte by byte: generates with the GPT that train_gpt_parallel.py has trained.

    python examples/train_gpt_parallel.py --checkpoints run
    python examples/generate.py --weights run                      # one process
    pdrun --devices 2 examples/generate.py --weights run --tp 2    # two devices share each weight
    pdrun --devices 2 examples/generate.py --weights run           # each generates for its prompts

All print the same text, sampled too. Without --weights the model is random, and so is the text.
"""

import argparse

import torch
from train_gpt import GPT

import pdrun
from pdrun import Strategy, col, heads, replicate, row

PROMPTS = ["import ", "def __init__(self", "    for ", "class "]
STRATEGY = Strategy(
    {
        "blocks.?": heads("tp", heads="heads"),
        "blocks.*.qkv": col("tp", blocks=3),
        "blocks.*.up": col("tp"),
        "blocks.*.proj|blocks.*.down": row("tp"),
        "blocks.*.norm[12]|bytes|norm": replicate(),
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a byte-level GPT.")
    parser.add_argument("--weights", help="the folder of checkpoints")
    parser.add_argument("--tp", type=int, default=1, help="devices that share each weight")
    parser.add_argument("--new", type=int, default=60, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    arguments = parser.parse_args()

    context = pdrun.init()
    torch.manual_seed(0)
    model = GPT(arguments.width, arguments.layers, arguments.heads, context=0)
    served = pdrun.infer(
        model,
        mesh=pdrun.mesh(dp=-1, tp=arguments.tp),
        strategy=STRATEGY,
        weights=arguments.weights,
    )
    prompts = [list(text.encode()) for text in PROMPTS]
    if arguments.verify:
        compared = served.verify(prompts)
        if context.is_main:
            print(f"logits within {compared.max_difference:.0e} of those of one process")
    found = served.generate(
        prompts, arguments.new, temperature=arguments.temperature, seed=arguments.seed
    )
    if context.is_main:
        for prompt, new in zip(PROMPTS, found, strict=True):
            print(prompt + bytes(new).decode(errors="replace"))
            print("--")
        print(served.explain())


if __name__ == "__main__":
    main()
