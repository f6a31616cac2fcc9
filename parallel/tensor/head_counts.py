"""
How many heads an attention has, and where it stores that: in attributes, in its configuration, and
in divisions of its forward.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

from pdrun.parallel.tensor.style import style_error

HEAD_COUNT_NAMES = (
    "num_heads",
    "n_heads",
    "n_head",
    "num_attention_heads",
    "nhead",
    "heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
KV_HEAD_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
GROUP_SIZE_NAMES = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
TOTAL_WIDTH_NAMES = ("split_size", "all_head_size", "inner_dim", "attn_dim")
HEAD_WIDTH_NAMES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
"""
Attributes in which modules store their numbers of heads, queries per key, the width of all heads
together, and that of one.
"""
ROW_COUNT_WORDS = ("batch", "bsz", "row")
"""Parts of names of what counts rows: a number divided by heads that is not a width."""


@dataclass(frozen=True)
class HeadCounts:
    """The heads of an attention, in total and on this rank."""

    heads: int
    kv: int
    parts: int

    @property
    def local_heads(self) -> int:
        """Query heads of a rank."""
        return self.heads // self.parts

    @property
    def local_kv(self) -> int:
        """Key and value heads that a rank computes."""
        return max(1, self.kv // self.parts)


def find_head_count(
    name: str, module: nn.Module, given: int | str | None, known: tuple[str, ...]
) -> int | None:
    """
    Return a number of heads: as given, from an attribute, or from a transformers configuration.

    Raises:
        UsageError: the given attribute has no number.
    """
    if isinstance(given, int):
        return given
    if isinstance(given, str):
        value = getattr(module, given, None)
        if not isinstance(value, int):
            raise style_error(name, f"its {given} must be a number of heads, got {value!r}")
        return value
    for source in (module, getattr(module, "config", None)):
        for key in known:
            value = getattr(source, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def find_head_width(module: nn.Module) -> int | None:
    """Return the width of a head, from an attribute; None without one."""
    for key in HEAD_WIDTH_NAMES:
        value = getattr(module, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


class LocalHeadCount(int):
    """
    A rank's number of heads that also divides full widths: the width of a head is the same on every
    rank.

    ``full_width // heads`` divides by the full number. Any other number is divided by the rank's.
    """

    full_count: int
    full_width: int

    @classmethod
    def of(cls, local: int, full: int, width: int) -> LocalHeadCount:
        """Return a rank's count, with the full count and the width of all heads together."""
        found = cls(local)
        found.full_count, found.full_width = full, width
        return found

    def _divisor(self, other: int) -> int:
        if other == self.full_width and not isinstance(other, LocalHeadCount):
            return self.full_count
        return int(self)

    def __rfloordiv__(self, other: int) -> int:
        return int(other) // self._divisor(other)

    def __rtruediv__(self, other: float) -> float:
        return float(other) / self._divisor(int(other) if other == int(other) else 0)

    def __rmod__(self, other: int) -> int:
        return int(other) % self._divisor(other)

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return divmod(int(other), self._divisor(other))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalHeadCount.of, (int(self), self.full_count, self.full_width)


class LocalConfig:
    """
    A model's configuration as one attention sees it: with this rank's numbers of heads.

    Everything else is read from the model's own, and written to it.
    """

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self.__dict__["_pdrun_config"] = config
        self.__dict__["_pdrun_counts"] = counts

    def __getattr__(self, key: str) -> Any:
        # copies and pickles ask before there is a dict
        state = self.__dict__
        if key.startswith("__") or "_pdrun_config" not in state:
            raise AttributeError(key)
        if key in state["_pdrun_counts"]:
            return state["_pdrun_counts"][key]
        return getattr(state["_pdrun_config"], key)

    def __setattr__(self, key: str, value: Any) -> None:
        setattr(self.__dict__["_pdrun_config"], key, value)


def divides_by_heads(kind: type, keys: tuple[str, ...]) -> bool:
    """
    Return whether a method of a class divides a width by one of these attributes, or may do so.

    A class without source may not: dividing is rare, and its result is checked by `verify`.
    """
    for base in kind.__mro__:
        if base in (object, nn.Module):
            continue
        if _source_divides(base, keys):
            return True
    return False


@functools.lru_cache(maxsize=256)
def _source_divides(kind: type, keys: tuple[str, ...]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return False
    methods = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]
    for method in methods:
        names = _names_of_counts(method, keys)
        for node in ast.walk(method):
            is_division = isinstance(node, ast.BinOp) and isinstance(
                node.op, (ast.Div, ast.FloorDiv, ast.Mod)
            )
            if is_division and _divides_width(node, names, keys):  # type: ignore[arg-type]
                return True
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "divmod":
                return True
    return False


def _names_of_counts(method: ast.FunctionDef, keys: tuple[str, ...]) -> set[str]:
    """Return the local variables that a method sets from a number of heads."""
    found: set[str] = set()
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            found.update(
                one.id
                for one, value in pairs
                if isinstance(one, ast.Name)
                and isinstance(value, ast.Attribute)
                and value.attr in keys
            )
    return found


def _divides_width(node: ast.BinOp, names: set[str], keys: tuple[str, ...]) -> bool:
    right = node.right
    is_count = (isinstance(right, ast.Attribute) and right.attr in keys) or (
        isinstance(right, ast.Name) and right.id in names
    )
    dividend = ast.unparse(node.left).lower()
    return is_count and not any(word in dividend for word in ROW_COUNT_WORDS)


def local_attributes(
    name: str,
    module: nn.Module,
    counts: HeadCounts,
    given: tuple[int | str | None, int | str | None],
    divide: tuple[str, ...],
    width: int | None,
) -> dict[str, Any]:
    """
    Return the attributes that depend on the number of heads, with the values of this rank.

    Args:
        given: the user's attributes of heads, and of key and value heads.
        divide: the user's other attributes to divide.
        width: of a head.

    Raises:
        UsageError: an attribute of ``divide`` cannot be divided.
    """
    attributes: dict[str, Any] = {}
    groups = (counts.heads // counts.kv, counts.local_heads // counts.local_kv)
    rows: tuple[tuple[Any, tuple[str, ...], int, int], ...] = (
        (given[0], HEAD_COUNT_NAMES, counts.heads, counts.local_heads),
        (given[1], KV_HEAD_COUNT_NAMES, counts.kv, counts.local_kv),
        (None, GROUP_SIZE_NAMES, *groups),
    )
    overrides: dict[str, int] = {}
    config = getattr(module, "config", None)
    for attribute, known, full, local in rows:
        keys = (attribute,) if isinstance(attribute, str) else known
        for key in keys:
            if getattr(module, key, None) == full:
                attributes[key] = local
            if getattr(config, key, None) == full:
                overrides[key] = local
    full_width = counts.heads * (width or 0)
    keys = tuple(key for key in attributes if key not in GROUP_SIZE_NAMES)
    if width and counts.parts > 1 and divides_by_heads(type(module), keys):
        for key in keys:
            full = int(getattr(module, key))
            attributes[key] = LocalHeadCount.of(attributes[key], full, full_width)
    for key in TOTAL_WIDTH_NAMES:
        if width and getattr(module, key, None) == full_width:
            attributes[key] = counts.local_heads * width
    for key in divide:
        value = getattr(module, key, None)
        if not isinstance(value, int) or value % counts.parts:
            raise style_error(
                name, f"its {key} must be a multiple of {counts.parts}, got {value!r}"
            )
        attributes[key] = value // counts.parts
    if overrides and counts.parts > 1 and not isinstance(config, LocalConfig):
        attributes["config"] = LocalConfig(config, overrides)
    return attributes
