"""
Modules at which a model is cut, and modules whose weights lie on another stage.

A module stays the object that it is, under its name, and is still an instance of its class: only
its class becomes a subclass, which asks the running stage what a call means, and reads weights that
aren't here as blanks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.metadata import WHERE

if TYPE_CHECKING:
    from pdrun.parallel.pipeline.stage import Stages


class Unit:
    """What a module at which a model may be cut knows: its name and its stage."""

    def __init__(self, stages: Stages, name: str, stage: int) -> None:
        self.stages = stages
        self.name = name
        self.stage = stage

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Return itself."""
        return self


class Absent:
    """A module whose weights are on another stage: they read as blanks."""

    def __getattr__(self, name: str) -> Any:
        gone: dict[str, tuple[str, Stages, Any]] = self.__dict__.get("_pdrun_absent", {})
        if name not in gone:
            return super().__getattr__(name)  # type: ignore[misc]
        full, stages, blank = gone[name]
        if stages.current is not None:
            stages.current.read.append(full)
        return blank


class Staged(Absent):
    """A module at which a model may be cut."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what a call means in the stage that runs; outside of one, what it always means."""
        unit: Unit = self.__dict__["_pdrun_unit"]
        one = unit.stages.current
        if one is not None:
            return one.call(unit, super().__call__, args, kwargs)  # type: ignore[misc]
        if unit.stage not in unit.stages.mine:
            what = (
                f"{unit.name} is on stage {unit.stage}, and this rank has {list(unit.stages.mine)}"
            )
            raise UsageError(
                what, where=WHERE, hint="run.step and run.evaluate run a model in stages"
            )
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def staged(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of a kind at which a model may be cut."""
    return _made(Staged, kind)


def absent(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of a kind whose weights are on another stage."""
    return _made(Absent, kind)


_known: dict[tuple[type, type], type[nn.Module]] = {}


def _made(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    if (mixin, kind) not in _known:
        about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _known[mixin, kind] = type(kind.__name__, (mixin, kind), about)
    return _known[mixin, kind]
