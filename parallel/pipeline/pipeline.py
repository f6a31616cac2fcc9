"""
`pdrun.Pipeline`: what the user says about stages and their schedule, held against model and mesh
before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.pipeline.p2p import PIPELINE_AXIS, P2PLinks
from pdrun.parallel.pipeline.runner import PipelineRunner
from pdrun.parallel.pipeline.schedules.builders import DEFAULT_CHUNKS, make_schedule
from pdrun.parallel.pipeline.schedules.schedule import API_NAME, PipelineSchedule, parse_schedule
from pdrun.parallel.pipeline.schedules.validate import connected_ranks, validate_schedule
from pdrun.parallel.pipeline.split import BALANCE_HINT, StageSplit, split_model
from pdrun.parallel.pipeline.stage import GraphModel, PipelineStages


@dataclass(frozen=True)
class Pipeline:
    """
    How a model is cut into stages over pp, and in which order these work.

    Attributes:
        microbatches: pieces of this rank's part of a batch; the rows needn't divide evenly.
        schedule: "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", or one's own (see
            `parse`).
        stages: {glob of modules: stage}; default: by ``balance``.
        chunks: stages a rank; default: 2 for "interleaved" and "zero-bubble-v", else 1.
        balance: "layers", "parameters", "flops" (which wants ``sample=`` of parallelize) or {glob:
            cost}.
        shared: globs of weights that the last stage uses besides the stage of their module (an
            embedding that is also
            the output layer by ``h @ self.embedding.weight.T``), or {glob: stages}. Ties by assignment need no word.
        dynamic: announce every micro-batch anew, for models whose branches depend on the data.
    """

    microbatches: int
    schedule: str | Sequence[Sequence[str | tuple[int, str, int]]] = "1f1b"
    stages: Mapping[str, int] | None = None
    chunks: int | None = None
    balance: str | Mapping[str, float] = "layers"
    shared: Sequence[str] | Mapping[str, Sequence[int]] = ()
    dynamic: bool = False

    def __post_init__(self) -> None:
        for name, value in (("microbatches", self.microbatches), ("chunks", self.chunks)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise UsageError(f"{name}={value!r} is no count of at least 1", where=API_NAME)
        if not isinstance(self.schedule, Sequence):
            raise UsageError(
                f"schedule={self.schedule!r} is none",
                where=API_NAME,
                hint=f"one of {', '.join(DEFAULT_CHUNKS)}",
            )
        if self.stages is not None and not isinstance(self.stages, Mapping):
            raise UsageError(
                f"stages={self.stages!r} is no dict",
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
                f"shared={self.shared!r} is no list", where=API_NAME, hint='shared=["emb.weight"]'
            )
        if not isinstance(self.dynamic, bool):
            raise UsageError(f"dynamic={self.dynamic!r} is neither True nor False", where=API_NAME)

    def plan(self, ranks: int) -> PipelineSchedule:
        """
        Return the schedule for a number of ranks along pp.

        Raises:
            UsageError: an unknown or unsound one, or one that doesn't fit ranks, chunks and
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
        found = parse_schedule(self.schedule)
        validate_schedule(found)
        said = {
            "pp": (ranks, found.rank_count),
            "microbatches": (self.microbatches, found.microbatch_count),
        }
        if self.chunks is not None:
            said["chunks"] = (self.chunks, found.stage_count // found.rank_count)
        wrong = [
            f"{name}={mine}, the schedule has {its}"
            for name, (mine, its) in said.items()
            if mine != its
        ]
        if wrong:
            raise UsageError("; ".join(wrong), where=API_NAME)
        return found

    def _named_schedule(self, name: str, ranks: int) -> PipelineSchedule:
        found = make_schedule(name, ranks, self.microbatches, self.chunks)
        if self.microbatches < ranks and name != "gpipe":
            raise UsageError(
                f"microbatches={self.microbatches} is less than pp={ranks}: {name} has each stage work on a micro-batch"
                " of its own",
                where=API_NAME,
                hint=f'microbatches={ranks} or more, or schedule="gpipe"',
            )
        validate_schedule(found)
        return found

    def split(self, model: nn.Module, axes: MeshGroups, sample: Any) -> StageSplit:
        """
        Return which module belongs to which stage; see `pdrun.parallel.interfaces.StageSplitter`.

        Raises:
            UsageError: the model can't be cut as was said.
        """
        stages = self.plan(axes[PIPELINE_AXIS].size).stage_count
        return split_model(model, stages, self.stages, self.balance, self.shared, sample)

    def apply(
        self, model: nn.Module, axes: MeshGroups, sample: Any
    ) -> tuple[nn.Module, PipelineRunner]:
        """
        Return this rank's stage of a model and what drives it; see
        `pdrun.parallel.interfaces.Pipeline`.

        Raises:
            UsageError: the model can't be cut as was said.
        """
        schedule = self.plan(axes[PIPELINE_AXIS].size)
        graph: GraphModel | None = getattr(model, "_pdrun_engine", None)
        cut = (graph.split() if graph else None) or self.split(model, axes, sample)
        stages = PipelineStages(
            model, cut, schedule.stages_of(axes[PIPELINE_AXIS].index), axes.device
        )
        if graph:
            graph.enter(stages)
        return model, PipelineRunner(
            schedule, stages, P2PLinks(axes, connected_ranks(schedule)), self.dynamic
        )
