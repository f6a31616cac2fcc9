"""What a user asks `parallelize` for, checked once."""

from __future__ import annotations

import inspect
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


@dataclass(frozen=True)
class Settings:
    """Options of the engine; see `pdrun.parallelize` for their meaning."""

    level: int = 0
    accumulate: int = 1
    clip: float | None = None
    norm: bool = False
    mean: bool = True
    exact: bool = True
    shard_group: int = 1
    threshold: int = 0
    layerwise: Sequence[str] = ()
    units: Sequence[str] | None = None
    fusion: BucketPolicy = field(default_factory=BucketPolicy)
    wire_dtype: torch.dtype | None = None
    precision: Precision = field(default_factory=Precision)
    master_device: torch.device | None = None
    """Where masters and optimizer state live; None: on the device."""
    gather: str = "pass"
    """How long level 3 has the weights of a unit there; see `gatherer`."""

    @property
    def keep_for_step(self) -> bool:
        """Whether level 3 gathers weights, and sums gradients over the ranks, once a step."""
        return self.level == 3 and self.gather == "step"


def check_level(level: Any) -> int:
    """Return the optimizer level, 0 to 3; MindSpore's names "level1" to "level3" are understood."""
    if isinstance(level, str) and level.removeprefix("level") in ("0", "1", "2", "3"):
        return int(level.removeprefix("level"))
    if level not in (0, 1, 2, 3) or isinstance(level, bool):
        raise UsageError(
            f"optimizer_level={level!r}",
            where=PARALLELIZE,
            hint="0 whole optimizer, 1 state cut, 2 and gradients, 3 and weights",
        )
    return int(level)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(
            f"{name}={value!r} is no whole number of at least {least}", where=PARALLELIZE
        )
    return value


def check_above_zero(name: str, value: Any) -> float | None:
    """Return a number above 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name}={value!r} is not above 0", where=PARALLELIZE)
    return float(value)


def check_globs(name: str, value: Any) -> tuple[str, ...]:
    """Return globs, of which there may be several."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(
            f"{name}={value!r} is no list of globs", where=PARALLELIZE, hint=f'{name}=["blocks.*"]'
        )
    found = tuple(value)
    if not all(isinstance(glob, str) for glob in found):
        raise UsageError(
            f"{name}={value!r} is no list of globs", where=PARALLELIZE, hint=f'{name}=["blocks.*"]'
        )
    return found


def check_methods(name: str, value: Any, methods: Sequence[str], hint: str) -> None:
    """
    Refuse what lacks one of the methods; None and classes that nobody has made an object of
    included.
    """
    if isinstance(value, type) or not all(
        callable(getattr(value, method, None)) for method in methods
    ):
        raise UsageError(f"{name}={value!r} is none", where=PARALLELIZE, hint=hint)


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose step wants more than to be called."""
    try:
        known = (
            inspect.signature(scheduler.step).parameters.values() if scheduler is not None else ()
        )
    except (TypeError, ValueError):  # not told
        return
    wanted = [
        each.name
        for each in known
        if each.default is each.empty and each.kind not in (VAR, VAR_KEYWORD)
    ]
    if wanted:
        name = type(scheduler).__name__
        what = f"the scheduler's step wants {', '.join(wanted)}, and a run calls it without anything: {name}"
        hint = f"leave scheduler= out; schedule = {name}(run.optimizer), and schedule.step(metrics.loss) after run.step"
        raise UsageError(what, where=PARALLELIZE, hint=hint)


def check_callable(name: str, value: Any, hint: str) -> None:
    """Refuse what can't be called, but for None."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r} is no function", where=PARALLELIZE, hint=hint)


def parse_compress(value: Any) -> torch.dtype | None:
    """Return the type of gradients on the network."""
    if value is None:
        return None
    if value not in ("bf16", "fp16"):
        raise UsageError(f"compress={value!r}", where=PARALLELIZE, hint="'bf16', 'fp16' or None")
    return DTYPES[value]


def check_gather(value: Any, level: int, copies: int, staged: bool) -> str:
    """
    Return how long weights that level 3 has gathered stay: for a "pass" or a "step".

    Args:
        copies: micro-batches that compute side by side.
        staged: whether a pipeline's schedule has several micro-batches on their way.
    """
    if value not in (None, "pass", "step"):
        raise UsageError(f"gather={value!r}", where=PARALLELIZE, hint="'pass', 'step' or None")
    if value is not None and level < 3:
        what = f"gather={value!r} at optimizer_level={level}, which gathers nothing"
        raise UsageError(what, where=PARALLELIZE, hint="optimizer_level=3, or leave gather= out")
    if value == "pass" and copies > 1:
        what = f"gather='pass' beside copies={copies}, of which one needs a unit's weights while the other has left it"
        raise UsageError(what, where=PARALLELIZE, hint="gather='step'")
    return value or ("step" if staged or copies > 1 else "pass")


def check_group(value: Any, world: int, level: int) -> int:
    """Return the size of a shard group: all ranks unless a divisor of their number is given."""
    if level == 0:
        if value is not None:
            raise UsageError(
                f"shard_group={value!r} with optimizer_level=0, which cuts nothing",
                where=PARALLELIZE,
            )
        return 1
    if value is None or value == -1:
        return world
    size = check_count("shard_group", value)
    if world % size:
        raise UsageError(
            f"shard_group={size} does not divide the {world} ranks of dp", where=PARALLELIZE
        )
    return size
