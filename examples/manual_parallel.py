"""
Manual parallelism: a two-layer network whose weights are sharded by hand, without `parallelize`.

    pdrun --devices 4 examples/manual_parallel.py

Each rank has some columns of the first weight and the same rows of the second. The sum over the
ranks is the result of one process, and so are the gradients.
"""

import torch
from torch.nn import functional as F

import pdrun
from pdrun.parallel import collectives

WIDTH, HIDDEN, ROWS, STEPS = 16, 64, 32, 20


def main() -> None:
    context = pdrun.init()
    ranks = collectives.group()
    torch.manual_seed(0)  # the same numbers on all ranks
    first = torch.randn(WIDTH, HIDDEN, device=context.device) / 4
    second = torch.randn(HIDDEN, WIDTH, device=context.device) / 8
    x, y = (torch.randn(ROWS, WIDTH, device=context.device) for _ in range(2))
    mine = [
        torch.tensor_split(weight, ranks.size, dim)[ranks.index].clone().requires_grad_()
        for weight, dim in ((first, 1), (second, 0))
    ]
    optimizer = torch.optim.SGD(mine, lr=0.5)
    for step in range(STEPS):
        partial = F.gelu(x @ mine[0]) @ mine[1]
        loss = F.mse_loss(collectives.all_reduce(partial, ranks), y)
        optimizer.zero_grad()
        (loss / ranks.size).backward()  # every rank has the whole loss: it counts once
        optimizer.step()
        if context.is_main and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.6f}")
    weights = collectives.all_gather(mine[1].detach(), ranks, dim=0, total=HIDDEN)
    if context.is_main:
        print(f"sum of the second weight: {weights.sum().item():.5f}")
    context.close()


if __name__ == "__main__":
    main()
