"""
A longer walk through the product that `test_transparency` samples.

    python -m tests.lib.transparency_sweep 500 [SEED]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.lib.rank_pool import Worlds
from tests.parallel.test_transparency import check, sample


def main(count: int, seed: int) -> int:
    """
    Run the cases, every second one saved and resumed; print what differs and return how many did.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    worlds, wrong = Worlds(), 0
    for place, case in enumerate(sample(count, seed)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(case, worlds, Path(folder) if place % 2 else None)
            except Exception as error:
                wrong += 1
                print(f"{case}: {error}", flush=True)
    worlds.close()
    print(f"{count - wrong} of {count} cases have the bits of one process")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)))
