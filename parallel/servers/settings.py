"""
The user's settings of served weights (`Servers`, `rows`, `dense`), and the description of a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdrun.errors import UsageError
from pdrun.parallel.servers.tables.optimizers import (
    DENSE_OPTIMIZERS,
    ROW_OPTIMIZERS,
    OptimizerSettings,
    make_optimizer,
)

_PARALLELIZE = "pdrun.parallelize"
MAX_TABLES = 4096
MAX_NAME_CHARS = 256
MAX_DIM = 65536
MAX_ELEMENTS = 1 << 40
SERVED_FOLDER = "served"
"""Folder of the servers' files in a checkpoint."""
ServedKind = Literal["rows", "dense"]


@dataclass(frozen=True)
class TableSpec:
    """A table, equal on all workers and servers."""

    name: str
    kind: ServedKind
    optimizer: OptimizerSettings
    size: int
    """rows: number of ids, 0 to ``size - 1``, or 0 for any 64-bit id. dense: elements."""
    dim: int = 1
    """Elements of a row; 1 for dense weights."""
    scale: float = 0.0
    """New rows are uniform in ``[-scale, scale]``."""
    seed: int = 0
    keep: int = 0
    """Most rows of the table, on all servers together; 0: no limit."""
    admit: int = 1
    """A row is stored when its id has had this many gradients."""
    is_assigned: bool = False
    """The worker of rank 0 sends the first values; other requests wait for them."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "optimizer": self.optimizer.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> TableSpec:
        """
        Inverse of `to_json`, for data from the network.

        Raises:
            ValueError: a value is missing or out of range.
        """
        names = {"name", "kind", "optimizer", "size", "dim", "scale", "seed", "keep", "admit"}
        if not isinstance(data, dict) or set(data) != names | {"is_assigned"}:
            raise ValueError("a table has other fields")
        whole = [data[name] for name in ("size", "dim", "seed", "keep", "admit")]
        is_good = (
            isinstance(data["name"], str)
            and 0 < len(data["name"]) <= MAX_NAME_CHARS
            and data["name"].isprintable()
            and data["kind"] in ("rows", "dense")
            and isinstance(data["is_assigned"], bool)
            and isinstance(data["scale"], (int, float))
            and all(type(number) is int and 0 <= number < 1 << 63 for number in whole)
            and 1 <= data["dim"] <= MAX_DIM
            and data["admit"] >= 1
            and (data["kind"] == "rows" or (0 < data["size"] <= MAX_ELEMENTS and data["dim"] == 1))
        )
        if not is_good:
            raise ValueError("a table's fields are out of range")
        optimizer = OptimizerSettings.from_json(data["optimizer"])
        if data["kind"] == "rows" and optimizer.name not in ROW_OPTIMIZERS:
            raise ValueError(f"rows have no optimizer {optimizer.name}")
        return cls(**{**data, "scale": float(data["scale"]), "optimizer": optimizer})

    def describe_difference(self, other: TableSpec) -> str:
        """Return the first field in which another table of this name differs, or an empty text."""
        for name, value in vars(self).items():
            theirs = getattr(other, name)
            if value != theirs:
                return f"{name} is {value} and {theirs}"
        return ""


@dataclass(frozen=True)
class ServedWeights:
    """How the weights that a glob matches are served."""

    kind: ServedKind
    optimizer: OptimizerSettings
    cache: int = 0
    """Most rows in the memory of a worker's device; 0: none."""


def rows(
    optimizer: str = "sgd", lr: float = 0.01, *, cache: int = 0, **options: Any
) -> ServedWeights:
    """
    Serve embedding tables by rows: a step moves only the rows that it looks up.

    Args:
        optimizer: sgd, momentum, adagrad, lazy_adam or ftrl. Only rows with a gradient change.
        lr: learning rate.
        cache: most rows that a worker keeps on its device; 0: none. It asks the servers only for
            those that have changed.
        options: of that optimizer: momentum; betas and eps; weight_decay; l1, l2, accumulator.
    """
    settings = make_optimizer(optimizer, lr, options, ROW_OPTIMIZERS, "pdrun.rows")
    if type(cache) is not int or not 0 <= cache < 1 << 40:
        raise UsageError(f"cache must be a number of rows, got {cache!r}", where="pdrun.rows")
    return ServedWeights("rows", settings, cache)


def dense(optimizer: str = "sgd", lr: float = 0.01, **options: Any) -> ServedWeights:
    """
    Serve whole weights: a step moves all of their gradient and all of their values.

    Args:
        optimizer: sgd, momentum, adagrad, lazy_adam, ftrl or adamw.
        lr: learning rate.
        options: of that optimizer, as for `rows`.
    """
    settings = make_optimizer(optimizer, lr, options, DENSE_OPTIMIZERS, "pdrun.dense")
    return ServedWeights("dense", settings)


@dataclass(frozen=True)
class Mode:
    """When a server uses gradients."""

    name: Literal["sync", "async", "bounded"]
    bound: int = 0
    """bounded: how many steps a worker may be ahead of the slowest one."""

    def __str__(self) -> str:
        return f"bounded:{self.bound}" if self.name == "bounded" else self.name


def parse_mode(text: Any, where: str = "pdrun.Servers") -> Mode:
    """
    Return the mode of ``"sync"``, ``"async"`` or ``"bounded:K"``; ``bounded:0`` is sync.

    Raises:
        UsageError: another text.
    """
    if text in ("sync", "bounded:0"):
        return Mode("sync")
    if text == "async":
        return Mode("async")
    match = re.fullmatch(r"bounded:([0-9]{1,6})", text) if isinstance(text, str) else None
    if match is None:
        what = f'mode must be "sync", "async" or "bounded:K", got {text!r}'
        raise UsageError(what, where=where, hint='use mode="bounded:4"')
    return Mode("bounded", int(match[1]))


class Servers:
    """
    Which weights are on servers, and how.

    Args:
        tables: globs (several are joined by ``|``) to `rows` or `dense`. `rows` matches names of
            embedding modules, `dense` names of weights. The first glob that matches counts.
        mode: "sync": a step uses the gradients of all workers, as without servers. "async": each
            worker's gradient is used when it arrives. "bounded:K": as async, and no worker is more
            than K steps ahead of the slowest one.
    """

    def __init__(self, tables: Mapping[str, ServedWeights], mode: str = "sync") -> None:
        self.mode = parse_mode(mode)
        if not isinstance(tables, Mapping) or not tables:
            what = f"needs globs of the weights to serve, got {tables!r}"
            raise UsageError(what, where="pdrun.Servers", hint='use {"*": pdrun.dense()}')
        for glob, served in tables.items():
            if not isinstance(glob, str) or not glob or not isinstance(served, ServedWeights):
                what = f"{glob!r}: must be a glob and pdrun.rows() or pdrun.dense(), got {served!r}"
                raise UsageError(what, where="pdrun.Servers")
        self.tables = dict(tables)

    def __repr__(self) -> str:
        return f"Servers({self.tables!r}, mode={str(self.mode)!r})"


def check_served(servers: Servers, options: dict[str, Any]) -> None:
    """
    Refuse what served weights do not support.

    Args:
        options: other options of `parallelize` by name; a value that is not false is refused.

    Raises:
        UsageError: names the option.
    """
    if not isinstance(servers, Servers):
        what = f"servers must be a pdrun.Servers, got {servers!r}"
        raise UsageError(what, where=_PARALLELIZE, hint='use pdrun.Servers({"*": pdrun.dense()})')
    for name, value in options.items():
        if value:
            raise UsageError(
                f"{name} is not supported with servers=",
                where=_PARALLELIZE,
                hint="leave one of both out; served weights need data parallelism alone",
            )
