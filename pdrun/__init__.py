"""
pdrun: start a distributed PyTorch job, restart it when it fails, report the first cause.

    import pdrun
    ctx = pdrun.init()                      # in a script: rank, device, process group; any launcher
    pdrun.progress(step)                    # in its loop: detects hangs and slow ranks
    results = pdrun.launch(fn, devices=4)   # in a program: run a function on four workers

Public names are imported on first use, so that ``import pdrun`` is fast.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would take longer than this module
    from typing import Any

    from pdrun import elastic as elastic
    from pdrun.elastic import progress as progress
    from pdrun.errors import ConfigError as ConfigError
    from pdrun.errors import DeadlineExceeded as DeadlineExceeded
    from pdrun.errors import JobFailed as JobFailed
    from pdrun.errors import PdrunError as PdrunError
    from pdrun.errors import PeerLost as PeerLost
    from pdrun.errors import RendezvousError as RendezvousError
    from pdrun.errors import UsageError as UsageError
    from pdrun.launcher.function.launch import launch as launch
    from pdrun.parallel import servers as servers
    from pdrun.parallel.auto.auto import Auto as Auto
    from pdrun.parallel.auto.degrees.planner import PlanReport as PlanReport
    from pdrun.parallel.auto.degrees.planner import plan_of as plan_of
    from pdrun.parallel.comm.mesh import mesh as mesh
    from pdrun.parallel.context_parallel.context import ContextParallel as ContextParallel
    from pdrun.parallel.context_parallel.context import positions as positions
    from pdrun.parallel.data.loader import Loader as Loader
    from pdrun.parallel.experts import Balance as Balance
    from pdrun.parallel.experts import MoE as MoE
    from pdrun.parallel.experts import experts as experts
    from pdrun.parallel.fp8.options import Fp8 as Fp8
    from pdrun.parallel.hooks.moving_average import MovingAverage as MovingAverage
    from pdrun.parallel.hooks.step_report import StepReport as StepReport
    from pdrun.parallel.hooks.watch_value import BestCheckpoint as BestCheckpoint
    from pdrun.parallel.hooks.watch_value import EarlyStop as EarlyStop
    from pdrun.parallel.inference.infer import infer as infer
    from pdrun.parallel.inference.kv_cache import KVCache as KVCache
    from pdrun.parallel.layouts.device_matrix import Layout as Layout
    from pdrun.parallel.layouts.layout import L as L
    from pdrun.parallel.model.meta_init import empty_init as empty_init
    from pdrun.parallel.operators.graph.constraints import constrain as constrain
    from pdrun.parallel.operators.graph.constraints import shard as shard
    from pdrun.parallel.operators.module import Operators as Operators
    from pdrun.parallel.operators.strategy import Cut as Cut
    from pdrun.parallel.operators.strategy import OpLayout as OpLayout
    from pdrun.parallel.parallelize import parallelize as parallelize
    from pdrun.parallel.pipeline.pipeline import Pipeline as Pipeline
    from pdrun.parallel.run import Run as Run
    from pdrun.parallel.servers.embedding import ServedEmbedding as ServedEmbedding
    from pdrun.parallel.servers.settings import Servers as Servers
    from pdrun.parallel.servers.settings import dense as dense
    from pdrun.parallel.servers.settings import rows as rows
    from pdrun.parallel.startup.debugger import breakpoint as breakpoint
    from pdrun.parallel.startup.init import Context as Context
    from pdrun.parallel.startup.init import init as init
    from pdrun.parallel.tensor import Strategy as Strategy
    from pdrun.parallel.tensor import col as col
    from pdrun.parallel.tensor import cross_entropy as cross_entropy
    from pdrun.parallel.tensor import fuse_head_loss as fuse_head_loss
    from pdrun.parallel.tensor import heads as heads
    from pdrun.parallel.tensor import linear_cross_entropy as linear_cross_entropy
    from pdrun.parallel.tensor import replicate as replicate
    from pdrun.parallel.tensor import row as row
    from pdrun.parallel.tensor import seq as seq
    from pdrun.parallel.tensor import strategy_for as strategy_for
    from pdrun.parallel.tensor import vocab as vocab
    from pdrun.parallel.zero.offload import Offload as Offload
    from pdrun.parallel.zero.precision import Precision as Precision
    from pdrun.worker_env import WorkerEnv as WorkerEnv

__version__ = "0.1.0"

_MODULE_OF = {
    "Auto": "pdrun.parallel.auto.auto",
    "PlanReport": "pdrun.parallel.auto.degrees.planner",
    "plan_of": "pdrun.parallel.auto.degrees.planner",
    "Balance": "pdrun.parallel.experts",
    "BestCheckpoint": "pdrun.parallel.hooks.watch_value",
    "ConfigError": "pdrun.errors",
    "Context": "pdrun.parallel.startup.init",
    "Cut": "pdrun.parallel.operators.strategy",
    "DeadlineExceeded": "pdrun.errors",
    "EarlyStop": "pdrun.parallel.hooks.watch_value",
    "PeerLost": "pdrun.errors",
    "Fp8": "pdrun.parallel.fp8.options",
    "JobFailed": "pdrun.errors",
    "PdrunError": "pdrun.errors",
    "RendezvousError": "pdrun.errors",
    "ServedEmbedding": "pdrun.parallel.servers.embedding",
    "Servers": "pdrun.parallel.servers.settings",
    "UsageError": "pdrun.errors",
    "WorkerEnv": "pdrun.worker_env",
    "breakpoint": "pdrun.parallel.startup.debugger",
    "ContextParallel": "pdrun.parallel.context_parallel.context",
    "KVCache": "pdrun.parallel.inference.kv_cache",
    "L": "pdrun.parallel.layouts.layout",
    "Layout": "pdrun.parallel.layouts.device_matrix",
    "Loader": "pdrun.parallel.data.loader",
    "MoE": "pdrun.parallel.experts",
    "MovingAverage": "pdrun.parallel.hooks.moving_average",
    "Offload": "pdrun.parallel.zero.offload",
    "OpLayout": "pdrun.parallel.operators.strategy",
    "Operators": "pdrun.parallel.operators.module",
    "Pipeline": "pdrun.parallel.pipeline.pipeline",
    "Precision": "pdrun.parallel.zero.precision",
    "Run": "pdrun.parallel.run",
    "StepReport": "pdrun.parallel.hooks.step_report",
    "Strategy": "pdrun.parallel.tensor",
    "col": "pdrun.parallel.tensor",
    "constrain": "pdrun.parallel.operators.graph.constraints",
    "cross_entropy": "pdrun.parallel.tensor",
    "linear_cross_entropy": "pdrun.parallel.tensor",
    "fuse_head_loss": "pdrun.parallel.tensor",
    "dense": "pdrun.parallel.servers.settings",
    "experts": "pdrun.parallel.experts",
    "heads": "pdrun.parallel.tensor",
    "replicate": "pdrun.parallel.tensor",
    "row": "pdrun.parallel.tensor",
    "rows": "pdrun.parallel.servers.settings",
    "seq": "pdrun.parallel.tensor",
    "servers": "pdrun.parallel.servers",
    "strategy_for": "pdrun.parallel.tensor",
    "vocab": "pdrun.parallel.tensor",
    "elastic": "pdrun.elastic",
    "empty_init": "pdrun.parallel.model.meta_init",
    "infer": "pdrun.parallel.inference.infer",
    "init": "pdrun.parallel.startup.init",
    "launch": "pdrun.launcher.function.launch",
    "mesh": "pdrun.parallel.comm.mesh",
    "parallelize": "pdrun.parallel.parallelize",
    "positions": "pdrun.parallel.context_parallel.context",
    "progress": "pdrun.elastic",
    "shard": "pdrun.parallel.operators.graph.constraints",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _MODULE_OF:
        module = _import_module(_MODULE_OF[name])
        if module.__name__.startswith("pdrun.parallel"):
            # a wrong argument is one line, also before `init`
            _import_module("pdrun.parallel.startup.excepthook").install_excepthook()
        if name in ("elastic", "servers"):
            return module
        return getattr(module, name)
    raise AttributeError(f"module 'pdrun' has no attribute {name!r}")


def _import_module(module: str) -> Any:
    """
    Import a module of pdrun.

    In the source tree, whose layout differs from the package's, raise a one-line error instead.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from pathlib import Path

        root = Path(__file__).parents[1]
        if not (error.name or "").startswith("pdrun.") or not (root / "pyproject.toml").exists():
            raise
        what = f"{root} is pdrun's source tree, which hides the installed package"
        hint = "run in another folder, or pip install -e ."
        raise ImportError(f"{what}: {hint}", name=error.name) from None


def put_standard_library_first(path: list[str]) -> None:
    """
    Move the standard library to the front of ``path``, in place.

    A ``json.py`` in the working directory or on PYTHONPATH is for the user's script and must not be
    imported by the launcher. Nothing is removed, because sites install packages through PYTHONPATH.
    """
    home = os.__file__.rpartition("/")[0]  # plain text: pathlib itself could be shadowed
    archive = f"{home.rpartition('/')[0]}/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    standard = (home, f"{home}/lib-dynload", archive)
    path.sort(key=lambda folder: folder not in standard)


def __dir__() -> list[str]:
    return sorted(__all__)
