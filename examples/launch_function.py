"""
Run a Python function on four workers and get four results: no script, no command line.

    python examples/launch_function.py

Each worker finds its rank with `pdrun.init()`. An exception in a worker is raised here as
`pdrun.JobFailed`.
"""

import random

import pdrun


def estimate_pi(points: int) -> float:
    """
    Throw points at a square on every worker; the mean of all workers' estimates is the result of
    each.
    """
    import torch
    import torch.distributed as dist

    with pdrun.init() as context:
        dice = random.Random(context.rank)
        inside = sum(dice.random() ** 2 + dice.random() ** 2 < 1 for _ in range(points))
        total = torch.tensor(4 * inside / points / context.world_size, device=context.device)
        dist.all_reduce(total)
        return total.item()


def main() -> None:
    try:
        results = pdrun.launch(estimate_pi, 100_000, devices=4, backend="cpu")
    except pdrun.JobFailed as error:
        raise SystemExit(f"rank {error.rank} on {error.host} failed:\n{error.traceback}") from None
    for rank, value in enumerate(results):
        print(f"rank {rank}: pi is about {value:.4f}")


if __name__ == "__main__":
    main()
