"""
`pdrun.Pipeline`: the user's stages and schedule, checked against model and mesh before a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.context_parallel.context import ContextParallel
from pdrun.parallel.model.copies import on_meta
from pdrun.parallel.pipeline.p2p import PIPELINE_AXIS, P2PLinks
from pdrun.parallel.pipeline.runner import PipelineRunner
from pdrun.parallel.pipeline.schedules.builders import (
    DEFAULT_CHUNKS,
    DEFAULT_SLICES,
    SLICED,
    make_schedule,
)
from pdrun.parallel.pipeline.schedules.schedule import API_NAME, PipelineSchedule, parse_schedule
from pdrun.parallel.pipeline.schedules.validate import connected_ranks, validate_schedule
from pdrun.parallel.pipeline.sequence_slices import SequenceSlices
from pdrun.parallel.pipeline.split import BALANCE_HINT, StageSplit, split_model
from pdrun.parallel.pipeline.stage import GraphModel, PipelineStages


@dataclass(frozen=True)
class Pipeline:
    """
    How a model is split into stages over pp, and their schedule.

    Attributes:
        microbatches: parts of this rank's part of a batch; the rows need not divide evenly.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "seqpipe",
            "seqvpp", "seqsmartvpp", or a schedule (see `parse_schedule`).
        stages: {glob of modules: stage}; default: by ``balance``.
        chunks: stages per rank; default: 2 for "interleaved", "zero-bubble-v", "seqvpp" and
            "seqsmartvpp", 1 for others.
        balance: "layers", "parameters", "flops" (needs ``sample=`` of parallelize) or {glob: cost}.
        shared: globs of weights that the last stage uses in addition to the stage of their module
            (an embedding that is also the output layer by ``h @ self.embedding.weight.T``), or
            {glob: stages}. Weights tied by assignment are found.
        dynamic: describe every micro-batch to the next stage, for models with data-dependent
            branches.
        slices: parts of each sequence, which pass the stages one after the other under "seqpipe",
            "seqvpp" and "seqsmartvpp" (2), for models whose attention is torch's and causal.
            ``context=`` of parallelize tells how sequences are sliced.
    """

    microbatches: int
    schedule: str | Sequence[Sequence[str | tuple[int, str, int]]] = "1f1b"
    stages: Mapping[str, int] | None = None
    chunks: int | None = None
    balance: str | Mapping[str, float] = "layers"
    shared: Sequence[str] | Mapping[str, Sequence[int]] = ()
    dynamic: bool = False
    slices: int | None = None
    _sequences: ContextParallel | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = {"microbatches": self.microbatches, "chunks": self.chunks, "slices": self.slices}
        for name, value in counts.items():
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                what = f"{name} must be an integer of at least 1, got {value!r}"
                raise UsageError(what, where=API_NAME)
        if not isinstance(self.schedule, Sequence):
            raise UsageError(
                f"schedule must be a name or a schedule, got {self.schedule!r}",
                where=API_NAME,
                hint=f"one of {', '.join(DEFAULT_CHUNKS)}",
            )
        if self.stages is not None and not isinstance(self.stages, Mapping):
            raise UsageError(
                f"stages must be a dict, got {self.stages!r}",
                where=API_NAME,
                hint='stages={"blocks.[0-3]": 0}',
            )
        if not isinstance(self.balance, (str, Mapping)):
            raise UsageError(f"balance={self.balance!r}", where=API_NAME, hint=BALANCE_HINT)
        for glob, cost in self.balance.items() if isinstance(self.balance, Mapping) else ():
            if (
                isinstance(cost, bool)
                or not isinstance(cost, (int, float))
                or not 0 <= cost < math.inf
            ):
                raise UsageError(
                    f"balance: the cost of {glob!r} is {cost!r}",
                    where=API_NAME,
                    hint="a number, 0 or more",
                )
        if not isinstance(self.shared, (Sequence, Mapping)):
            raise UsageError(
                f"shared must be a list or dict, got {self.shared!r}",
                where=API_NAME,
                hint='shared=["emb.weight"]',
            )
        if not isinstance(self.dynamic, bool):
            raise UsageError(f"dynamic must be a bool, got {self.dynamic!r}", where=API_NAME)

    @property
    def slice_count(self) -> int:
        """Parts of each sequence; 1: sequences are not sliced."""
        if self.slices is not None:
            return self.slices
        return DEFAULT_SLICES if self.schedule in SLICED else 1

    def with_sequences(self, context: ContextParallel) -> Pipeline:
        """Return the same with the context that slices sequences."""
        found = replace(self)
        object.__setattr__(found, "_sequences", context)
        return found

    def plan(self, ranks: int) -> PipelineSchedule:
        """
        Return the schedule for a number of ranks along pp.

        Raises:
            UsageError: the schedule is unknown or invalid, or does not fit ranks, chunks and
            micro-batches.
        """
        if (
            isinstance(self.schedule, str)
            and "\n" not in self.schedule
            and self.schedule.strip() != ""
        ):
            named = self.schedule in DEFAULT_CHUNKS or not any(
                kind in self.schedule for kind in "FBIW"
            )
            if named:
                return self._named_schedule(self.schedule, ranks)
        found = parse_schedule(self.schedule, slices=self.slice_count)
        validate_schedule(found)
        counts = {
            "pp": (ranks, found.rank_count),
            "microbatches": (self.microbatches, found.microbatch_count),
        }
        if self.chunks is not None:
            counts["chunks"] = (self.chunks, found.stage_count // found.rank_count)
        wrong = [
            f"{name}={mine}, the schedule has {its}"
            for name, (mine, its) in counts.items()
            if mine != its
        ]
        if wrong:
            raise UsageError("; ".join(wrong), where=API_NAME)
        return found

    def _named_schedule(self, name: str, ranks: int) -> PipelineSchedule:
        found = make_schedule(name, ranks, self.microbatches, self.chunks, self.slices)
        if found.piece_count < ranks and name != "gpipe":
            sliced = f" times slices={found.slices}" if found.slices > 1 else ""
            raise UsageError(
                f"microbatches={self.microbatches}{sliced} is less than pp={ranks}: in {name} every"
                " stage works on a different micro-batch",
                where=API_NAME,
                hint=f'microbatches={ranks} or more, or schedule="gpipe"',
            )
        validate_schedule(found)
        return found

    def split(self, model: nn.Module, axes: MeshGroups, sample: Any) -> StageSplit:
        """
        Return the stage of each module; see `pdrun.parallel.interfaces.StageSplitter`.

        Raises:
            UsageError: the model cannot be split like this.
        """
        stages = self.plan(axes[PIPELINE_AXIS].size).stage_count
        return split_model(model, stages, self.stages, self.balance, self.shared, sample)

    def apply(
        self, model: nn.Module, axes: MeshGroups, sample: Any
    ) -> tuple[nn.Module, PipelineRunner]:
        """
        Return this rank's stage of a model and its driver; see
        `pdrun.parallel.interfaces.PipelineCutter`.

        Raises:
            UsageError: the model cannot be split like this.
        """
        schedule = self.plan(axes[PIPELINE_AXIS].size)
        graph: GraphModel | None = getattr(model, "_pdrun_engine", None)
        cut = (graph.split() if graph else None) or self.split(model, axes, sample)
        # traced before the first step; a graph knows what passes its stages
        full = None if graph else on_meta(model)
        stages = PipelineStages(
            model, cut, schedule.stages_of(axes[PIPELINE_AXIS].index), axes.device
        )
        if graph:
            graph.enter(stages)
        links = P2PLinks(axes, connected_ranks(schedule))
        slicer = None
        if schedule.slices > 1:
            assert self._sequences is not None  # `parallelize` sets it
            slicer = SequenceSlices(self._sequences, axes)
        return model, PipelineRunner(schedule, stages, links, self.dynamic, full, slicer)
