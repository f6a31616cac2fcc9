"""
Long runs of the simulator: ``python -m tests.rendezvous.simulator --seeds 10000 --nodes 50``.

Each seed is one job's life. A seed that breaks a rule is printed with all that happened in it, and
the exit code is 1; ``--first SEED --seeds 1 --trace`` shows it again.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from .life import Life, life


def main() -> int:
    """Run many lives; return 0 when all kept the rules."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rendezvous.simulator", description=__doc__
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many lives")
    parser.add_argument(
        "--nodes", type=int, default=50, help="most nodes of a job; each seed draws its own count"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--trace", action="store_true", help="print what happened in each life")
    parser.add_argument(
        "--most-failures", type=int, default=5, help="stop after so many broken seeds"
    )
    asked = parser.parse_args()
    began, events, faults, codes, kinds, broken = (
        time.monotonic(),
        0,
        0,
        Counter[int](),
        Counter[str](),
        0,
    )
    generations = restarts = 0
    seeds = range(asked.first, asked.first + asked.seeds)
    with ProcessPoolExecutor(asked.jobs) as pool:
        for result in pool.map(
            partial(_one, nodes=asked.nodes, traced=asked.trace), seeds, chunksize=8
        ):
            if isinstance(result, str):
                broken += 1
                print(result, flush=True)
                if broken >= asked.most_failures:
                    pool.shutdown(cancel_futures=True)
                    break
                continue
            events, faults = events + result.events, faults + result.faults
            generations, restarts = generations + result.generations, restarts + result.restarts
            codes[result.code] += 1
            kinds.update(result.kinds)
            if asked.trace:
                print(
                    f"seed {result.seed}: code {result.code} after {result.seconds:.1f} s",
                    *result.trace,
                    sep="\n",
                )
    spent = time.monotonic() - began
    print(
        f"{sum(codes.values())} lives of up to {asked.nodes} nodes, {events} events, {faults} faults "
        f"({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}), {generations} generations, "
        f"{restarts} restarts, codes {dict(sorted(codes.items()))}, {broken} broken, {spent:.0f} s"
    )
    return 1 if broken else 0


def _one(seed: int, nodes: int, traced: bool) -> Life | str:
    try:
        return life(seed, nodes, traced=traced)
    except Exception:
        first = traceback.format_exc(limit=-3)
        try:
            life(seed, nodes, traced=True)
        except Exception as again:
            error = again
        notes = "\n".join(getattr(error, "__notes__", ())[-60:])
        return f"{first}\nwhat had happened:\n{notes}\nBROKEN seed {seed}: {error}"


if __name__ == "__main__":
    sys.exit(main())
