"""
pdrun: start a PyTorch job on whatever the cluster is, keep it alive, tell the truth when it fails.

    import pdrun
    ctx = pdrun.init()                      # in a script: rank, device and collective, however the job was started
    pdrun.progress(step)                    # in its loop: hangs and slow ranks are found (pdrun.elastic has more)
    results = pdrun.launch(fn, devices=4)   # in a program: run a function on four workers, get four results

Names are loaded on first use, so that ``import pdrun`` costs nothing.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would take longer than all else here
    from typing import Any

    from pdrun import elastic as elastic
    from pdrun.elastic import progress as progress
    from pdrun.env import WorkerEnv as WorkerEnv
    from pdrun.errors import ConfigError as ConfigError
    from pdrun.errors import DeadlineExceeded as DeadlineExceeded
    from pdrun.errors import JobFailed as JobFailed
    from pdrun.errors import PdrunError as PdrunError
    from pdrun.errors import PeerLost as PeerLost
    from pdrun.errors import RendezvousError as RendezvousError
    from pdrun.errors import UsageError as UsageError
    from pdrun.launcher.function import launch as launch
    from pdrun.parallel.context import Context as Context
    from pdrun.parallel.context import init as init
    from pdrun.parallel.layouts.bound import Layout as Layout
    from pdrun.parallel.layouts.layout import L as L
    from pdrun.parallel.loader import Loader as Loader
    from pdrun.parallel.mesh import mesh as mesh
    from pdrun.parallel.meta import empty_init as empty_init
    from pdrun.parallel.modules import Strategy as Strategy
    from pdrun.parallel.modules import col as col
    from pdrun.parallel.modules import cross_entropy as cross_entropy
    from pdrun.parallel.modules import heads as heads
    from pdrun.parallel.modules import replicate as replicate
    from pdrun.parallel.modules import row as row
    from pdrun.parallel.modules import seq as seq
    from pdrun.parallel.modules import strategy_for as strategy_for
    from pdrun.parallel.modules import vocab as vocab
    from pdrun.parallel.modules.context import ContextParallel as ContextParallel
    from pdrun.parallel.modules.context import positions as positions
    from pdrun.parallel.offload import Offload as Offload
    from pdrun.parallel.operators.constraints import constrain as constrain
    from pdrun.parallel.operators.constraints import shard as shard
    from pdrun.parallel.operators.module import Operators as Operators
    from pdrun.parallel.operators.strategy import Cut as Cut
    from pdrun.parallel.parallelize import parallelize as parallelize
    from pdrun.parallel.pipeline.pipeline import Pipeline as Pipeline
    from pdrun.parallel.precision import Precision as Precision
    from pdrun.parallel.run import Run as Run

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "pdrun.errors",
    "Context": "pdrun.parallel.context",
    "Cut": "pdrun.parallel.operators.strategy",
    "DeadlineExceeded": "pdrun.errors",
    "PeerLost": "pdrun.errors",
    "JobFailed": "pdrun.errors",
    "PdrunError": "pdrun.errors",
    "RendezvousError": "pdrun.errors",
    "UsageError": "pdrun.errors",
    "WorkerEnv": "pdrun.env",
    "ContextParallel": "pdrun.parallel.modules.context",
    "L": "pdrun.parallel.layouts.layout",
    "Layout": "pdrun.parallel.layouts.bound",
    "Loader": "pdrun.parallel.loader",
    "Offload": "pdrun.parallel.offload",
    "Operators": "pdrun.parallel.operators.module",
    "Pipeline": "pdrun.parallel.pipeline.pipeline",
    "Precision": "pdrun.parallel.precision",
    "Run": "pdrun.parallel.run",
    "Strategy": "pdrun.parallel.modules",
    "col": "pdrun.parallel.modules",
    "constrain": "pdrun.parallel.operators.constraints",
    "cross_entropy": "pdrun.parallel.modules",
    "heads": "pdrun.parallel.modules",
    "replicate": "pdrun.parallel.modules",
    "row": "pdrun.parallel.modules",
    "seq": "pdrun.parallel.modules",
    "strategy_for": "pdrun.parallel.modules",
    "vocab": "pdrun.parallel.modules",
    "elastic": "pdrun.elastic",
    "empty_init": "pdrun.parallel.meta",
    "init": "pdrun.parallel.context",
    "launch": "pdrun.launcher.function",
    "mesh": "pdrun.parallel.mesh",
    "parallelize": "pdrun.parallel.parallelize",
    "positions": "pdrun.parallel.modules.context",
    "progress": "pdrun.elastic",
    "shard": "pdrun.parallel.operators.constraints",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name in _HOMES:
        home = _load(_HOMES[name])
        return home if name == "elastic" else getattr(home, name)
    raise AttributeError(f"module 'pdrun' has no attribute {name!r}")


def _load(module: str) -> Any:
    """Import a module of pdrun; where this is the source tree, which holds the others elsewhere, say so in one line."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from pathlib import Path

        root = Path(__file__).parents[1]
        if not (error.name or "").startswith("pdrun.") or not (root / "pyproject.toml").exists():
            raise
        what = f"{root} is pdrun's source tree, which hides the installed package"
        raise ImportError(f"{what}: use another folder, or pip install -e .", name=error.name) from None


def __dir__() -> list[str]:
    return sorted(__all__)
