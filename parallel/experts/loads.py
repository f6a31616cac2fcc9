"""
The loads of all experts of a run: summed over the ranks once per step, after the optimizer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.experts.balance import counted_layers, move_balance, pass_state
from pdrun.parallel.experts.dispatch import ROWS_NAME, ExpertGroups
from pdrun.parallel.experts.moe import MoE

MIB = 1024 * 1024


@dataclass(frozen=True)
class ExpertLoad:
    """
    How the rows of one layer were spread over its experts in a step.

    Attributes:
        load_max: rows of the busiest expert, as a multiple of the mean.
        load_min: rows of the idlest expert, in the same unit.
        dropped: share of the rows that capacity dropped.
    """

    load_max: float
    load_min: float
    dropped: float


class ExpertBalancer:
    """
    Counts and balances the experts of a run.

    Args:
        model: what this rank runs.
        place: this rank's groups; all ranks make their balancers together.
    """

    def __init__(self, model: nn.Module, place: RankGroups) -> None:
        self._place = place
        self._layers = counted_layers(model)
        mine = {name: layer.expert_loads.experts for name, layer in self._layers.items()}
        self._experts: dict[str, int] = dict(mine)
        if place.mesh.pp > 1:
            sent = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8)
            for part in place.job.gather_bytes(sent, "the names of layers with experts"):
                self._experts.update(json.loads(bytes(part.tolist())))
        self._experts = dict(sorted(self._experts.items()))
        self._bytes_before = 0
        self._last: tuple[int, StepLoads] | None = None

    def begin_step(self) -> None:
        """Forget what other passes than those of a step have counted."""
        self._bytes_before = self._sent_bytes()
        for layer in self._layers.values():
            layer.expert_loads.take()

    def end_step(self, is_skipped: bool) -> StepLoads | None:
        """Sum the counts over the ranks, and balance the layers unless the step was skipped."""
        pass_state.begin_pass()
        if not self._experts:
            return None
        device = self._place.data.device
        width = max(self._experts.values()) + 1
        counts = torch.zeros(len(self._experts), width, dtype=torch.int64, device=device)
        for row, name in enumerate(self._experts):
            layer = self._layers.get(name)
            found = None if layer is None else layer.expert_loads.take()
            if found is not None and self._place.is_first_on_tensor:
                counts[row, : len(found)] = found.to(device)
        total = self._place.job.sum_small(counts, "the loads of experts").wait()
        if not is_skipped:
            with torch.no_grad():
                for row, (name, experts) in enumerate(self._experts.items()):
                    if name in self._layers:
                        move_balance(self._layers[name], total[row, :experts])
        loads = StepLoads(self._experts, total)
        self._last = self._sent_bytes() - self._bytes_before, loads
        return loads

    def describe(self) -> Iterator[str]:
        """Yield lines for `Run.explain`: where experts are, how they compute, the last step."""
        lines: dict[str, list[str]] = {}
        for name, layer in self._layers.items():
            lines.setdefault(_describe_layer(layer), []).append(name)
        for text, names in lines.items():
            yield f"{', '.join(names)}: {text}"
        if self._last is not None:
            sent, loads = self._last
            worst = max(load.load_max for load in loads.read().values())
            text = f"in the last step the busiest expert had {worst:.2f} times the mean"
            if sent:
                text += f"; this rank sent {sent / MIB:.2f} MiB in all-to-alls of rows"
            yield text

    def _sent_bytes(self) -> int:
        """Return what this rank has sent to experts so far."""
        axes = {
            layer._context.experts.names
            for layer in self._layers.values()
            if isinstance(getattr(layer, "_context", None), ExpertGroups)
        }
        counts = self._place.axes.counts
        return sum(counts[key].nbytes for key in counts if key[0] == ROWS_NAME and key[1] in axes)


def _describe_layer(layer: Any) -> str:
    """Return where a layer's experts are, and why their products are a loop if they are."""
    total = layer.expert_loads.experts
    groups = getattr(layer, "_context", None)
    text = f"{total} experts, each on every rank"
    if isinstance(groups, ExpertGroups):
        count = total // groups.experts.size
        text = f"{total} experts, {count} per rank {groups.experts.label}, rows by all-to-all"
    why = layer.why_looped() if isinstance(layer, MoE) else ""
    return f"{text}; their products are a loop: {why}" if why else text


class StepLoads:
    """The loads of a step; copied from the device when they are read."""

    def __init__(self, experts: Mapping[str, int], counts: torch.Tensor) -> None:
        self._experts = experts
        self._counts = counts

    def read(self) -> dict[str, ExpertLoad]:
        """Return the load of each layer by its name."""
        found = {}
        rows = self._counts.tolist()
        for (name, experts), row in zip(self._experts.items(), rows, strict=True):
            kept = sum(row[:experts])
            mean = max(kept, 1) / experts
            lost = row[experts]
            load = ExpertLoad(
                max(row[:experts]) / mean, min(row[:experts]) / mean, lost / max(kept + lost, 1)
            )
            found[name] = load
        return found
