"""
How much of the devices' peak a run uses for its model (MFU).

    MFU = FLOPs of the model in a step / (seconds of a step * devices * peak of a device)

FLOPs are those that one process without recomputation needs for the global batch, forward and
backward, attention in full, as in "PaLM" (arXiv:2204.02311, appendix B). What ranks compute twice
does not count. They are counted once, in the first step of rank 0, on fake tensors.
"""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from pdrun import elastic
from pdrun.parallel.auto.topology import Topology
from pdrun.parallel.pipeline.balance import CPU_ATTENTION, count_attention
from pdrun.parallel.report.device_peak import find_peak
from pdrun.parallel.report.model_copies import meta_copy
from pdrun.parallel.training.step import slice_batch

if TYPE_CHECKING:
    from pdrun.parallel.training.state import RunState

_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class StepUtilization:
    """FLOPs of a step, and the peak of all devices; made once."""

    flops: float
    """Of the model, for the batch of the first step; 0: not known."""
    peak: float
    """FLOP per second of all devices; 0: not known."""

    def read_share(self, seconds: float | None) -> dict[str, float]:
        """Return the share of the peak as the number ``mfu``; empty: not known."""
        if not (self.flops and self.peak and seconds):
            return {}
        return {"mfu": self.flops / (seconds * self.peak)}


def measure_utilization(state: RunState, batch: Any, topology: Topology | None) -> StepUtilization:
    """
    Return what is needed for the MFU of this run; rank 0 of a job of pdrun reports it, too.

    Args:
        batch: of the step that was just made.
        topology: for which the run was planned, if it was given.
    """
    if not elastic.takes_plan():
        return StepUtilization(0.0, 0.0)
    peak = find_peak(product_kind(state), topology)
    if peak is None:
        return StepUtilization(0.0, 0.0)
    facts = [("peak of a device", peak.describe(), peak.source)]
    try:
        flops = count_step_flops(state, batch)
        facts.append(("FLOPs per step", f"{flops:.4g}", "counted in the first step"))
    except Exception as error:  # of the user's model, which may need values
        flops = 0.0
        reason = f"not counted: {type(error).__name__}: {error}"
        facts.append(("FLOPs per step", reason.splitlines()[0], "fake tensors"))
    elastic.report_plan(facts)
    return StepUtilization(flops, peak.flops * state.mesh.size)


def product_kind(state: RunState) -> str:
    """Return the number type of a run's matrix products."""
    kind = state.settings.precision.compute
    if kind:
        return str(kind)
    types = {weight.dtype for weight in state.engine.weights if weight.is_trained}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if types == {dtype}:
            return name
    is_wide = torch.get_float32_matmul_precision() == "highest"
    return "fp32" if is_wide or state.device.type == "cpu" else "tf32"


def count_step_flops(state: RunState, batch: Any) -> float:
    """
    Return the FLOPs of the model for a global batch, forward and backward.

    Args:
        batch: as for `Run.step`.

    Raises:
        Exception: of the model, if it does not run on fake tensors.
    """
    if state.served is not None:
        raise NotImplementedError("weights on parameter servers have no fake values")
    micros = [micro for micro in slice_batch(state, batch) if micro.weight]
    first = micros[0]
    rows: int = sum(len(micro.rows) for micro in micros) * state.row_axis.size
    mapping = {
        CPU_ATTENTION: count_attention,
        _CPU_ATTENTION_BACKWARD: _count_attention_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with (
        state.rng.isolate_generators(state.device),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        _stay_eager(),
    ):
        model = _copy_whole_model(state, fake)
        part = pytree.tree_map(
            lambda leaf: (
                fake.from_tensor(leaf.to(state.device)) if isinstance(leaf, torch.Tensor) else leaf
            ),
            first.batch,
        )
        with counter, state.engine.paused(), state.axes.dry_run():
            total, _ = state.compute_objective(model, part, first.rows, 0)
            total.backward()
    return float(counter.get_total_flops()) / len(first.rows) * rows


def _copy_whole_model(state: RunState, fake: Any) -> nn.Module:
    """Return the model of one process, with fake weights and buffers."""
    if state.original_model is None:
        return meta_copy(state, fake)
    memo: dict[int, Any] = {}
    for param in state.original_model.parameters():
        value = torch.empty(param.shape, dtype=param.dtype, device=state.device)
        memo[id(param)] = nn.Parameter(value, param.requires_grad)
    for buffer in state.original_model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=state.device)
    return copy.deepcopy(state.original_model, memo)


def _stay_eager() -> AbstractContextManager[Any]:
    """Return the context manager in which nothing is compiled; loading the compiler takes 1 s."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _count_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))
