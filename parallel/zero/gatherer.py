"""
Level 3: a unit's weights are gathered just before it computes, and released after use.

    "pass"      a unit is in memory for one forward or one backward
    "step"      from its first forward of a step to its last backward: gathered once per step

Weights outside of units, or in several units (tied weights), stay from the first forward of their
chunk to its last backward. A *chunk* is a part of a pipeline's stage; a model without stages is one
chunk. `gather_order` defines the order of gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.model.digest import digest_values
from pdrun.parallel.model.forward_wrapper import RunHook, exclude_hooks
from pdrun.parallel.model.released import ReleasedWeight, exclude_released, refuse_read
from pdrun.parallel.zero.gather_order import (
    GatherSchedule,
    release_buckets,
    start_gathers,
    wait_gathers,
)
from pdrun.parallel.zero.shards import ShardedBucket


class UnitGatherer:
    """
    Gathers and releases the buckets of each unit around its computations.

    Args:
        model: the model; hooks are registered on it and on the units.
        buckets: by unit; those of the model itself under the empty string.
        units: names of the units in registration order.
        keep_for_step: whether units stay for a step.
        on_skipped: called in the backward pass with a unit that this rank did not run: its
            gradients are complete.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Mapping[str, Sequence[ShardedBucket]],
        units: Sequence[str],
        comm: ShardedGroup,
        keep_for_step: bool,
        on_skipped: Callable[[int], None],
    ) -> None:
        self._units = [list(buckets[name]) for name in units]
        self._comm = comm
        self._keep_for_step = keep_for_step
        self._schedules = _build_schedules(self._units, buckets.get("", []), on_skipped)
        self._schedule_of_unit = {
            index: schedule for schedule in self._schedules.values() for index in schedule.units
        }
        self._phase = "idle"
        self._active_schedules: list[GatherSchedule] = []
        """The schedules of this pass: one, or all if the model is called outside of a step."""
        self._ran_forward: dict[tuple[int, int], set[int]] = {}
        """Units that this rank ran forward, by chunk and micro-batch."""
        self._ran_in_pass: set[int] = set()
        """Units that ran forward, of this pass."""
        self._is_last = self._is_outside_step = False
        self.is_paused = False
        """Whether the hooks do nothing: a copy of the model has them too."""
        self._is_gathered = False
        """Whether all weights are in memory for the user's code."""
        self._has_frozen = [
            any(not w.is_trained for cut in unit for w in cut.weights) for unit in self._units
        ]
        exclude_released()
        exclude_hooks()
        untraced = torch_compat.exclude_function  # the program may compile what calls the units
        for index, cuts in enumerate(self._units):
            for cut in cuts:
                cut.on_read = untraced(functools.partial(self._serve_read, index))
        model.register_forward_pre_hook(RunHook(self._enter_model), prepend=True)
        model.register_forward_hook(RunHook(self._leave_model))
        for index, name in enumerate(units):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(RunHook(self._make_enter_hook(index)), prepend=True)
            module.register_forward_hook(RunHook(self._make_leave_hook(index)))
        for module in model.modules():
            if module._parameters:
                module.register_load_state_dict_pre_hook(RunHook(self._refuse_loading))

    # ---- passes -------------------------------------------------------------

    def begin_forward(self, chunk: int, micro: int) -> None:
        """Start the forward pass of a micro-batch through a chunk."""
        self._is_outside_step, self._ran_in_pass = False, set()
        self._ran_forward[chunk, micro] = self._ran_in_pass
        self._begin_pass("forward", [self._schedule_of(chunk)])

    def end_forward(self) -> None:
        """Gather the units that this rank skipped, and agree on the order after the first pass."""
        for schedule in self._active_schedules:
            schedule.finish_pass(self._ran_in_pass)
            schedule.agree_on_order(self._comm)
            schedule.move_kept_units()
            schedule.is_resident = self._is_keeping
        self._phase = "idle"
        self._active_schedules = []

    def begin_backward(self, chunk: int, micro: int, last: bool, for_input: bool) -> None:
        """
        Begin the backward pass of a micro-batch through a chunk.

        Args:
            last: whether it is the chunk's last one of the step.
            for_input: whether no weight gets its gradient in it.
        """
        schedule = self._schedule_of(chunk)
        ran = self._ran_forward.pop((chunk, micro), set())
        self._is_outside_step = False
        self._is_last = last
        self._ran_in_pass = (
            set(schedule.units) if for_input else ran
        )  # gradients of weights follow later, so none is missing
        self._begin_pass("backward", [schedule])

    def gather_rest(self) -> None:
        """In a backward pass, gather the units that this rank skipped."""
        if self._phase == "backward":
            for schedule in self._active_schedules:
                schedule.finish_pass(self._ran_in_pass)

    def end_backward(self) -> None:
        """End a backward pass; after the last one no unit of the chunk stays in memory."""
        self.gather_rest()
        for schedule in self._active_schedules:
            if self._is_last:
                self._close_schedule(schedule)
            elif not self._is_keeping:
                schedule.close_units()
        self._phase = "idle"
        self._active_schedules = []

    def release_unit(self, unit: int) -> None:
        """Free a unit's memory if it is not needed again: its gradients are complete."""
        if (
            self._phase == "backward"
            and not self._has_frozen[unit]
            and not self.is_root(unit)
            and (self._is_last or not self._is_keeping)
        ):
            release_buckets(self._units[unit])

    def release_chunk(self, chunk: int | None = None) -> None:
        """Release the weights of a chunk; None: all weights."""
        if self._is_gathered:
            what = "a step, an evaluation or another gather inside it is not supported"
            raise UsageError(what, where="pdrun.Run.gathered_weights", hint="leave it before")
        self._phase = "idle"
        self._active_schedules = []
        self._is_outside_step = False
        for index, schedule in self._schedules.items():
            if chunk in (None, index):
                self._close_schedule(schedule)
        if chunk is None:
            self._ran_forward.clear()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """
        Return a context manager in which all weights are in memory; every rank must enter it.

        What is changed inside is trained from then on.

        Raises:
            UsageError: the ranks have changed a weight differently.
        """
        self.release_chunk()
        self._meet("gathered_weights", "run.gathered_weights() is entered")
        cuts = [cut for schedule in self._schedules.values() for cut in schedule.all_buckets()]
        start_gathers(cuts)
        wait_gathers(cuts)
        weights = [weight for cut in cuts for weight in cut.weights]
        before = digest_values([weight.param for weight in weights])
        self.is_paused = self._is_gathered = True
        try:
            yield
            self._keep_changes(cuts, before)
        finally:
            self.is_paused = self._is_gathered = False
            release_buckets(cuts, is_checked=False)

    def _keep_changes(self, cuts: Sequence[ShardedBucket], before: Sequence[int]) -> None:
        """Give the optimizer the weights that differ from their digests of before."""
        weights = [weight for cut in cuts for weight in cut.weights]
        for weight in weights:
            if weight.param.shape != weight.shape:
                what = f"{weight.name} has shape {tuple(weight.param.shape)}, not {weight.shape}"
                raise UsageError(what, where="pdrun.Run.gathered_weights")
        now = digest_values([weight.param for weight in weights])
        content = torch.tensor(now, dtype=torch.int64).view(torch.uint8)
        ranks = self._comm.gather_bytes(content, "what was changed in gathered_weights")
        for other, found in enumerate(ranks):
            for weight, mine, theirs in zip(weights, now, found.view(torch.int64), strict=True):
                if mine != int(theirs):
                    raise UsageError(
                        f"{weight.name} has other values on rank {self._comm.ranks[other]}",
                        where="pdrun.Run.gathered_weights",
                        hint="change it on every rank, to the same values (load the same file)",
                    )
        index = 0
        for cut in cuts:
            end = index + len(cut.weights)
            pairs = zip(before[index:end], now[index:end], strict=True)
            changed = {slot for slot, (old, new) in enumerate(pairs) if old != new}
            if changed:
                cut.keep_changes(changed)
            index = end

    def _begin_pass(self, phase: str, schedules: list[GatherSchedule]) -> None:
        self._phase = phase
        self._active_schedules = schedules
        for schedule in schedules:
            schedule.is_active = True
            start_gathers(schedule.root)
            schedule.begin_pass(backward=phase == "backward", keep_units=self._is_keeping)
        for schedule in schedules:
            wait_gathers(schedule.root)

    def _close_schedule(self, schedule: GatherSchedule) -> None:
        schedule.is_active = schedule.is_resident = False
        schedule.close_units()
        used = {
            id(cut) for other in self._schedules.values() if other.is_active for cut in other.root
        }
        release_buckets(cut for cut in schedule.root if id(cut) not in used)

    def _schedule_of(self, chunk: int) -> GatherSchedule:
        return self._schedules.setdefault(
            chunk, GatherSchedule({}, [], lambda unit: None)
        )  # a chunk without sharded weights

    @property
    def _is_keeping(self) -> bool:
        return self._keep_for_step and not self._is_outside_step

    def is_root(self, unit: int) -> bool:
        """Whether a unit's weights are read outside of its forward, so that they stay longer."""
        return self._schedule_of_unit[unit].is_kept(unit)

    def _serve_read(self, unit: int, cut: ShardedBucket, name: str) -> None:
        """
        Gather a unit in whose weight code outside of it reads, in a forward pass; else raise.
        """
        schedule = self._schedule_of_unit.get(unit)
        if (
            self.is_paused
            or self._phase != "forward"
            or schedule not in self._active_schedules
            or schedule is None
            or unit not in schedule.units
        ):
            raise refuse_read(name)
        self._meet(f"read {name}", f"{name} is read outside of the forward of its module")
        if unit not in self._ran_in_pass:
            self._ran_in_pass.add(unit)
            schedule.note_run(unit)
        schedule.keep_unit(unit)

    def _meet(self, label: str, what: str) -> None:
        """
        Wait for the other ranks on the data axes; see `CollectiveWatchdog.meet`.

        Ranks with other copies of the shards take part: all must gather, and later sum gradients,
        in one order.
        """
        self._comm.watchdog.meet(label, self._comm.ranks, what)

    def position_of(self, unit: int) -> int:
        """
        Return the position of a unit in its chunk's forward passes, as far as the ranks have agreed
        on one.
        """
        return self._schedule_of_unit[unit].position_of(unit)

    # ---- hooks --------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        again = self._is_outside_step and self._phase == "backward"
        if not self.is_paused and (again or self._phase == "idle"):  # called outside of a step
            if not again:
                what = "the model is called outside of a step, and level 3 gathers its weights"
                self._meet("a call outside of a step", what)
            self._is_outside_step, self._ran_in_pass = True, set()
            self._begin_pass("forward", list(self._schedules.values()))

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_outside_step and not self.is_paused and not torch.is_grad_enabled():
            self.end_forward()
            self.release_chunk()

    def _refuse_loading(self, module: nn.Module, *args: Any) -> None:
        for param in module._parameters.values():
            if isinstance(param, ReleasedWeight):
                raise refuse_read(param._pdrun_name)

    def _make_enter_hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.is_paused or self.is_root(index):
                return
            if self._phase == "backward":  # a recomputed forward
                start_gathers(self._units[index])
                wait_gathers(self._units[index])
                return
            if self._phase == "idle":  # the module is called without the model around it
                return
            self._ran_in_pass.add(index)
            self._schedule_of_unit[index].open_unit(index, self._ran_in_pass)

        return hook

    def _make_leave_hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.is_paused or self._phase != "forward" or self._is_keeping:
                return
            if self.is_root(index):
                return
            release_buckets(self._units[index])
            if torch.is_grad_enabled():
                _call_on_first_grad(output, lambda: self._before_backward(index))

        return hook

    def _refuse_double_backward(self) -> None:
        """
        Refuse a gradient inside a forward pass that is itself differentiated: it needs all weights
        again.
        """
        what = 'create_graph=True inside a forward pass is not supported with gather="pass"'
        hint = 'use gather="step": units stay from their first forward to their last backward'
        raise UsageError(what, where="pdrun.Run.step", hint=hint)

    def _before_backward(self, index: int) -> None:
        if self._phase == "forward" and not self._is_outside_step and torch.is_grad_enabled():
            self._refuse_double_backward()
        if self._phase != "backward":  # of a call outside of a step
            self._begin_pass("backward", list(self._schedules.values()))
        if not self.is_root(index):
            self._schedule_of_unit[index].open_unit(index, self._ran_in_pass)


def _build_schedules(
    units: Sequence[list[ShardedBucket]],
    root: Sequence[ShardedBucket],
    on_skipped: Callable[[int], None],
) -> dict[int, GatherSchedule]:
    """Return a schedule for each chunk."""
    chunks = {chunk for cuts in [*units, root] for cut in cuts for chunk in cut.chunks}
    mine = {index: cuts[0].chunks[0] for index, cuts in enumerate(units)}
    return {
        chunk: GatherSchedule(
            {index: units[index] for index in mine if mine[index] == chunk},
            [cut for cut in root if chunk in cut.chunks],
            on_skipped,
        )
        for chunk in sorted(chunks)
    }


def _call_on_first_grad(values: Any, call: Callable[[], None]) -> None:
    """
    Call a function when the first gradient of a computation's results is available.

    The gradient of a tensor that was only passed through arrives later. Weights, which can be
    passed through too, outlive the pass.
    """
    called = False

    def came(grad: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and torch_compat.is_transformed(leaf):
            what = 'a unit inside torch.func (vmap, grad) is not supported with gather="pass"'
            hint = 'use gather="step": units stay from their first forward to their last backward'
            raise UsageError(what, where="pdrun.Run.step", hint=hint)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            leaf.register_hook(came)
