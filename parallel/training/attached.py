"""Objects of the program whose state is saved and loaded with the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdrun.errors import UsageError

RUN_ATTACH = "pdrun.Run.attach"


class AttachedObjects:
    """The objects by name, and states that were loaded for objects that are not attached yet."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, target: Any) -> None:
        """
        Attach an object; it gets the state that a checkpoint has for its name.

        Raises:
            UsageError: it lacks a method, or the name is taken.
        """
        missing = [
            method
            for method in ("state_dict", "load_state_dict")
            if not callable(getattr(target, method, None))
        ]
        if missing:
            what = f"{type(target).__name__} has no {' and no '.join(missing)}"
            raise UsageError(what, where=RUN_ATTACH)
        if not isinstance(name, str) or not name:
            raise UsageError(f"name must be a text, got {name!r}", where=RUN_ATTACH)
        if name in self._objects:
            what = f"{name!r} is attached already: a {type(self._objects[name]).__name__}"
            raise UsageError(what, where=RUN_ATTACH, hint="name= another one")
        self._objects[name] = target
        if name in self._waiting:
            target.load_state_dict(self._waiting.pop(name))

    def state_dicts(self) -> dict[str, Any]:
        """Return the states by name; those of objects that are not attached are kept."""
        states = {name: target.state_dict() for name, target in self._objects.items()}
        return {**self._waiting, **states}

    def load(self, states: Mapping[str, Any]) -> None:
        """Give the objects their states of a checkpoint; an object without one keeps its state."""
        self._waiting = {name: value for name, value in states.items() if name not in self._objects}
        for name, target in self._objects.items():
            if name in states:
                target.load_state_dict(states[name])
