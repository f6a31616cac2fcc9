"""
Checks that a checkpoint belongs to a run, before anything of it is loaded.

Weights, their state and buffers are matched by name and shape, groups of the optimizer by index. A
checkpoint of another model can contain everything that this run asks for. A checkpoint of another
optimizer, or of other groups, would be loaded without an error and would train with other learning
rates or an incomplete state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint.reader import CheckpointReader

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

WEIGHTS_ONLY_HINT = (
    "build the run as it was saved; run.export and run.load_weights transfer weights only"
)


def fingerprint(state: RunState) -> dict[str, Any]:
    """
    Return what identifies a run's optimizer and scheduler: kinds, and the weights of each group.
    """
    scheduler = state.scheduler
    return {
        "optimizer": type(state.optimizer).__qualname__,
        "scheduler": None if scheduler is None else type(scheduler).__qualname__,
        "members": state.group_members,
    }


def check_compatible(state: RunState, reader: CheckpointReader) -> None:
    """
    Refuse a checkpoint of another run.

    Raises:
        ConfigError: it belongs to another model, optimizer or scheduler; names the difference.
    """
    for mismatch in (
        *_find_unknown_tensors(state, reader),
        *_compare_kinds(state, reader.run_json.get("made")),
        *_compare_groups(state, reader.run_json),
    ):
        raise ConfigError(mismatch, where=str(reader.folder), hint=WEIGHTS_ONLY_HINT)


def _find_unknown_tensors(state: RunState, reader: CheckpointReader) -> Iterator[str]:
    full_model = state.original_model or state.model
    kept = set(full_model.state_dict(keep_vars=True)) | state.persistent_buffers
    known = {
        f"buffers/{name}"
        for name, _ in (*full_model.named_buffers(), *state.model.named_buffers())
        if name in kept
    }
    for entry in state.engine.catalogue.weights:
        names = [entry.name]
        if entry.unsynced:
            names = [f"{entry.name}@{rank}" for rank in range(state.data_group.world)]
        known.update(f"weights/{name}" for name in names)
    for name in reader.tensor_names():
        kind, _, rest = name.partition("/")
        if kind in ("weights", "buffers") and name not in known:
            yield f"has the {kind.removesuffix('s')} {rest}, which this run lacks"


def _compare_kinds(state: RunState, saved: Mapping[str, Any] | None) -> Iterator[str]:
    mine = fingerprint(state)
    for what in ("optimizer", "scheduler") if saved is not None else ():
        here = mine[what]
        there = saved[what] if saved else None
        if here != there:
            saved_kind = _describe_kind(what, there)
            yield f"was saved with {saved_kind}, this run has {_describe_kind(what, here)}"


def _describe_kind(what: str, kind: str | None) -> str:
    return f"no {what}" if kind is None else f"the {what} {kind}"


def _compare_groups(state: RunState, saved: Mapping[str, Any]) -> Iterator[str]:
    here = len(state.optimizer.param_groups)
    there = len(saved["groups"])
    if here != there:
        yield f"has {there} optimizer groups, this run has {here}"
    members: Sequence[Sequence[str]] = saved.get("made", {}).get("members", ())
    for index, (old, new) in enumerate(zip(members, state.group_members, strict=False)):
        for name in sorted({*old} ^ {*new}):
            has = "has" if name in old else "lacks"
            yield f"{has} {name} in the optimizer's group {index}, unlike this run"
