"""The engine's settings, and checks of single arguments of `parallelize`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.model.weights import BucketPolicy
from pdrun.parallel.zero.precision import DTYPES, Precision

PARALLELIZE = "pdrun.parallelize"
VAR = inspect.Parameter.VAR_POSITIONAL
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
ACCUMULATED = "accumulated"
_SIZE = re.compile(r"(\d{1,12}) ?(B|KB|MB|GB)")


@dataclass(frozen=True)
class Settings:
    """Options of the engine; see `pdrun.parallelize` for their meaning."""

    level: int = 0
    accumulate: int = 1
    clip: float | None = None
    norm: bool = False
    mean: bool | str = True
    """
    Whether gradients are those of the mean. ACCUMULATED: of the mean times the micro-batches, as
    MindSpore adds up micro-batches of which each has its own mean.
    """
    exact: bool = True
    shard_group: int = 1
    threshold: int = 0
    layerwise: Sequence[str] = ()
    units: Sequence[str] | None = None
    fusion: BucketPolicy = field(default_factory=BucketPolicy)
    wire_dtype: torch.dtype | None = None
    precision: Precision = field(default_factory=Precision)
    master_device: torch.device | None = None
    """Device of masters and optimizer state; None: this rank's device."""
    gather: str = "pass"
    """How long level 3 keeps a unit's weights; see `gatherer`."""

    @property
    def gradient_factor(self) -> int:
        """By what the gradient of the mean is multiplied."""
        return self.accumulate if self.mean == ACCUMULATED else 1

    @property
    def keep_for_step(self) -> bool:
        """Whether level 3 gathers weights, and sums gradients over the ranks, once per step."""
        return self.level == 3 and self.gather == "step"


def check_level(level: Any) -> int:
    """Return the optimizer level, 0 to 3; MindSpore's names "level1" to "level3" are accepted."""
    if isinstance(level, str) and level.removeprefix("level") in ("0", "1", "2", "3"):
        return int(level.removeprefix("level"))
    if level not in (0, 1, 2, 3) or isinstance(level, bool):
        raise UsageError(
            f"optimizer_level must be 0, 1, 2 or 3, got {level!r}",
            where=PARALLELIZE,
            hint="0: no sharding, 1: optimizer state, 2: and gradients, 3: and weights",
        )
    return int(level)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{name} must be an integer of at least {least}, got {value!r}", where=PARALLELIZE
        )
    return value


def parse_threshold(value: Any) -> int:
    """
    Return bytes: a number of them, or a text such as "64KB".

    Raises:
        UsageError: another value.
    """
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip().upper())
        if found is None:
            what = f"threshold must be bytes, or a text such as '64KB', got {value!r}"
            raise UsageError(what, where=PARALLELIZE, hint="units: B, KB, MB, GB (1 KB = 1024 B)")
        return int(found[1]) << {"B": 0, "KB": 10, "MB": 20, "GB": 30}[found[2]]
    return check_count("threshold", value, 0)


def check_mean(value: Any) -> bool | str:
    """Return what gradients are divided by: see `Settings.mean`."""
    if type(value) is not bool and value != ACCUMULATED:
        what = f"gradients_mean must be True, False or {ACCUMULATED!r}, got {value!r}"
        raise UsageError(what, where=PARALLELIZE)
    return ACCUMULATED if value == ACCUMULATED else bool(value)


def check_above_zero(name: str, value: Any) -> float | None:
    """Return a number above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name} must be a number above 0, got {value!r}", where=PARALLELIZE)
    return float(value)


def check_globs(name: str, value: Any) -> tuple[str, ...]:
    """Return a list of globs as a tuple."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(
            f"{name} must be a list of globs, got {value!r}",
            where=PARALLELIZE,
            hint=f'{name}=["blocks.*"]',
        )
    found = tuple(value)
    if not all(isinstance(glob, str) for glob in found):
        raise UsageError(
            f"{name} must be a list of globs, got {value!r}",
            where=PARALLELIZE,
            hint=f'{name}=["blocks.*"]',
        )
    return found


def check_methods(name: str, value: Any, methods: Sequence[str], hint: str) -> None:
    """Refuse an object without the methods, None and classes included."""
    has_all = all(callable(getattr(value, method, None)) for method in methods)
    if isinstance(value, type) or not has_all:
        needed = " and ".join(f"{method}()" for method in methods)
        what = f"{name} must be an object with {needed}, got {value!r}"
        raise UsageError(what, where=PARALLELIZE, hint=hint)


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose step needs an argument."""
    if scheduler is None:
        return
    try:
        known = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):  # no signature
        return
    wanted = [
        each.name
        for each in known
        if each.default is each.empty and each.kind not in (VAR, VAR_KEYWORD)
    ]
    if wanted:
        name = type(scheduler).__name__
        what = f"{name}.step needs {', '.join(wanted)}, and a run calls it without arguments"
        hint = f"leave scheduler= out; make schedule = {name}(run.optimizer), call "
        hint += 'run.attach("schedule", schedule), and schedule.step(metrics.loss) after run.step'
        raise UsageError(what, where=PARALLELIZE, hint=hint)


def check_callable(name: str, value: Any, hint: str) -> None:
    """Refuse a value that is neither callable nor None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name} must be a function, got {value!r}", where=PARALLELIZE, hint=hint)


def parse_compress(value: Any) -> torch.dtype | None:
    """Return the type of gradients on the network."""
    if value is None:
        return None
    if value not in ("bf16", "fp16"):
        what = f"compress must be 'bf16', 'fp16' or None, got {value!r}"
        raise UsageError(what, where=PARALLELIZE)
    return DTYPES[value]


def check_gather(value: Any, level: int, copies: int, staged: bool) -> str:
    """
    Return how long level 3 keeps gathered weights: for a "pass" or a "step".

    Args:
        copies: micro-batches that compute side by side.
        staged: whether a pipeline's schedule has several micro-batches in flight.
    """
    if value not in (None, "pass", "step"):
        what = f"gather must be 'pass', 'step' or None, got {value!r}"
        raise UsageError(what, where=PARALLELIZE)
    if value is not None and level < 3:
        what = f"gather={value!r} requires optimizer_level=3, got {level}"
        raise UsageError(what, where=PARALLELIZE, hint="leave gather= out")
    if value == "pass" and copies > 1:
        what = f"gather='pass' is not supported with copies={copies}: copies share a unit's weights"
        raise UsageError(what, where=PARALLELIZE, hint="use gather='step'")
    if value is not None:
        return str(value)
    return "step" if staged or copies > 1 else "pass"


def check_group(value: Any, world: int, level: int) -> int:
    """Return the size of a shard group: all ranks, or a divisor of their number."""
    if level == 0:
        if value is not None:
            raise UsageError(
                f"shard_group={value!r} requires optimizer_level 1, 2 or 3",
                where=PARALLELIZE,
            )
        return 1
    if value is None or value == -1:
        return world
    size = check_count("shard_group", value)
    if world % size:
        raise UsageError(
            f"shard_group must divide the {world} ranks of the data axes, got {size}",
            where=PARALLELIZE,
        )
    return size
