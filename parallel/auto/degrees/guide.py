"""
The text of a search over degrees: the table of candidates, and the sentences of a guide.

A sentence compares the chosen plan with the best one on the other side of a border: without a
feature that it has, or with one that it lacks. Nothing is from a table of model sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdrun.parallel.auto.degrees.choices import StepChoice
from pdrun.parallel.auto.degrees.result import OuterResult, PricedChoice
from pdrun.parallel.auto.search.missing_rules import describe_missing_rules
from pdrun.text import plural

GIB = 2**30
BACKWARD_FLOPS = 2.0
"""FLOPs of a backward pass per FLOP of the forward pass."""
MAX_REFUSED = 6
"""Refused degrees that are listed."""


@dataclass(frozen=True)
class Feature:
    """Something that a plan has or has not."""

    name: str
    has: Callable[[PricedChoice], bool]


FEATURES = (
    Feature("tensor parallel", lambda one: one.choice.tp > 1),
    Feature("experts on several devices", lambda one: one.choice.ep > 1),
    Feature("pipeline stages", lambda one: one.choice.pp > 1),
    Feature("an optimizer level above 0", lambda one: one.choice.level > 0),
    Feature("sharded weights (level 3)", lambda one: one.choice.level == 3),
    Feature("recomputation", lambda one: one.choice.recompute is not None),
    Feature("several micro-batches", lambda one: one.choice.microbatches > 1),
)


def describe_result(result: OuterResult, top: int = 10) -> str:
    """Return the table of the best candidates and the sentences about them."""
    note = describe_missing_rules(result.missing)
    axes = EXPERT_LEGEND if result.request.expert_layers else ""
    legend = LEGEND.format(experts=axes)
    lines = [*_describe_search(result), *_table(result, top), legend, *([note] if note else [])]
    if result.fitting:
        lines.append(f"chosen: {describe_choice(result.fitting[0].choice)}; compared with it")
    return "\n".join([*lines, *list_sentences(result)])


LEGEND = (
    "MFU: share of the devices' peak rate; GiB: of the fullest device; pp: stages of layers;"
    "\ndp: parts of the batch; {experts}tp: parts of each operator; level: what is sharded over the"
    " parts\nof the batch, 0 is nothing, 3 is all; bound by: what takes most time beside computing"
)
EXPERT_LEGEND = "ep: parts of the experts; "
LEVEL_TEXTS = {
    0: "each of them has all weights, gradients and optimizer state",
    1: "optimizer state is sharded over them (level 1)",
    2: "optimizer state and gradients are sharded over them (level 2)",
    3: "optimizer state, gradients and weights are sharded over them (level 3)",
}
GATHER_TEXTS = {"pass": "gathered for each pass", "step": "gathered once per step"}


def describe_choice(choice: StepChoice) -> str:
    """Return in a sentence what each device does, for readers who do not know the degrees."""
    parts = []
    if choice.row_parts > 1:
        group = choice.pp * choice.tp
        count = choice.row_parts
        who = f"{count} groups of {group} devices" if group > 1 else f"{count} devices"
        rows = plural(choice.rows * choice.microbatches, "row")
        axes = ", ".join(axis for axis, size in (("dp", choice.dp), ("ep", choice.ep)) if size > 1)
        parts.append(f"{who} work on {rows} each ({axes})")
        level = LEVEL_TEXTS[choice.level]
        if choice.gather is not None:
            level += f", weights are {GATHER_TEXTS[choice.gather]}"
        if choice.ep > 1 and not choice.level:
            level += ", but for experts"
        parts.append(level)
    if choice.ep > 1:
        parts.append(
            f"the experts of a layer are divided over {choice.ep} of them, and tokens travel to"
            " their experts (ep)"
        )
    if choice.tp > 1:
        axes = f", as {_format_tensor_axes(choice)}" if choice.factors else ""
        parts.append(f"each operator is split over {choice.tp} devices (tp{axes})")
    if choice.pp > 1:
        parts.append(f"the layers are split into {choice.pp} stages (pp)")
    if choice.microbatches > 1:
        parts.append(
            f"a step has {choice.microbatches} micro-batches of {plural(choice.rows, 'row')}"
        )
    if choice.recompute is not None:
        parts.append("activations are computed again in the backward pass")
    return "; ".join(parts) or "one device does everything"


def _describe_search(result: OuterResult) -> Iterator[str]:
    request = result.request
    topology = request.topology
    guess = ", a guess: pdrun doctor --calibrate measures it" if topology.is_guess else ""
    yield (
        f"{request.devices} devices, {_format_gib(request.memory)} GiB each,"
        f" {request.rows} rows per step; topology {topology.name}{guess}"
    )
    count = len(result.fitting) + len(result.too_large)
    yield (
        f"{count} candidates: {len(result.fitting)} fit, {len(result.too_large)} need more memory,"
        f" {len(result.refused)} degrees refused; {result.solves} searches of operators"
    )


def _table(result: OuterResult, top: int) -> Iterator[str]:
    experts = "  ep" if result.request.expert_layers else ""
    yield (
        f"        ms   MFU     GiB   pp  dp{experts}  tp  level    recompute  micro-batches     "
        "schedule     bound by"
    )
    for number, one in enumerate(result.fitting[:top], 1):
        yield f"{number:3} {_row(result, one)}"
    for one in result.too_large[: max(0, 3 - len(result.fitting))]:
        yield f"  - {_row(result, one)}, too large"
    for name, why in list(result.refused.items())[:MAX_REFUSED]:
        yield f"  - {name}: {why}"
    if len(result.refused) > MAX_REFUSED:
        yield f"  - and {len(result.refused) - MAX_REFUSED} more"


def _row(result: OuterResult, one: PricedChoice) -> str:
    choice, cost = one.choice, one.cost
    level = str(choice.level)
    if choice.gather is not None:
        level += f", {choice.gather}"
    peak = result.request.topology.device.rate_of("bf16").peak
    if result.request.itemsize == 4:
        peak = result.request.topology.device.rate_of("fp32").peak
    flops = result.flops * (1 + BACKWARD_FLOPS) * result.request.rows
    share = flops / (cost.total * result.request.devices * peak)
    layers = ""
    if choice.stage_layers:
        layers = f"; layers {'+'.join(map(str, choice.stage_layers))}"
    experts = f" {choice.ep:3}" if result.request.expert_layers else ""
    micro = f"{choice.microbatches} x {plural(choice.rows, 'row')}"
    return (
        f"{_format_ms(cost.total)} {share:5.0%} {_format_gib(cost.peak):>7}"
        f"  {choice.pp:3} {choice.dp:3}{experts} {_format_tensor_axes(choice):>3}"
        f"  {level:8} {choice.recompute or 'none':10} {micro:17}"
        f" {choice.schedule or '-':12} {cost.bound_by}{layers}"
    )


def _format_tensor_axes(choice: StepChoice) -> str:
    """Return the degree of the tensor axis, or those of several: 2x4."""
    return "x".join(map(str, choice.tensor_axes.values()))


def _format_ms(seconds: float) -> str:
    """Return milliseconds in six columns, with digits where there are few."""
    value = seconds * 1e3
    return f"{value:6,.0f}" if value >= 100 else f"{value:6.2f}"


def _format_gib(nbytes: float) -> str:
    """Return GiB; of a small model with enough digits to compare."""
    value = nbytes / GIB
    return f"{value:.1f}" if value >= 1 or not nbytes else f"{value:.2g}"


def list_sentences(result: OuterResult) -> Iterator[str]:
    """Yield a sentence per feature: what the best plan on the other side of the border costs."""
    if not result.fitting:
        return
    chosen = result.fitting[0]
    for feature in FEATURES:
        has = feature.has(chosen)
        preposition = "without" if has else "with"
        others = [one for one in result.fitting if feature.has(one) != has]
        large = [one for one in result.too_large if feature.has(one) != has]
        if others:
            more = others[0].cost.total / chosen.cost.total - 1
            text = f"{preposition} {feature.name}: {more:+.0%} time"
            text += f", {_format_gib(others[0].cost.peak)} GiB"
        elif large:
            text = f"{preposition} {feature.name}: needs {_format_gib(large[0].cost.peak)} GiB"
        else:
            continue
        border = None if has else _border(result, feature)
        if border is not None:
            text += f"; the fastest plan has it if a device has less than {_format_gib(border)} GiB"
        yield text


def _border(result: OuterResult, feature: Feature) -> int | None:
    """Return the memory below which the fastest candidate has a feature; None if it never has."""
    everything = sorted(
        [*result.fitting, *result.too_large], key=lambda one: (one.cost.total, one.cost.peak)
    )
    limit = result.request.memory
    while True:
        best = next((one for one in everything if one.cost.peak <= limit), None)
        if best is None:
            return None
        if feature.has(best):
            return limit
        limit = best.cost.peak - 1
