"""
torch.compile, per module.

    True                    each unit (member of a ModuleList or Sequential)
    ["blocks.*"]            the modules of these names
    {"mode": "max-autotune-no-cudagraphs", "modules": ["blocks.*"]}
                            options of torch.compile, and the modules

Compilation applies to this rank's part of the model, after it is partitioned, and inside of what
wraps a unit: hooks, recomputation, gathered weights. Collectives of tensor axes are operators in
the graph (see `custom_ops`). Modules of one kind share their code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.model.forward_wrapper import COMPILED_MARK, wrap_forward
from pdrun.parallel.model.recompute import match_modules, parse_recompute
from pdrun.parallel.zero.settings import PARALLELIZE, check_globs

KEEP_BUFFERS = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""
Options with which no operator writes into the inputs of an earlier one: deferred gradients of
weights are computed from these inputs later.
"""
COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def parse_options(value: Any) -> tuple[tuple[str, ...] | None, dict[str, Any]] | None:
    """
    Return globs (None: units) and torch.compile's options; None if nothing is compiled.

    Raises:
        UsageError: the value has none of the forms above.
    """
    if value is None or value is False:
        return None
    if value is True:
        return None, {}
    if not isinstance(value, Mapping):
        return _require_names(check_globs("compile", value)), {}
    given = dict(value)
    globs = given.pop("modules", None)
    wrong = [str(key) for key in given if key not in COMPILE_OPTIONS]
    if wrong:
        what = f"compile={value!r}: unknown options: {', '.join(wrong)}"
        raise UsageError(what, where=PARALLELIZE, hint=f"use modules, {', '.join(COMPILE_OPTIONS)}")
    more = given.get("options")
    if more is not None and not isinstance(more, Mapping):
        what = f"compile={value!r}: options must be a dict, got {more!r}"
        raise UsageError(what, where=PARALLELIZE, hint='{"options": {"max_autotune": True}}')
    if (
        given.get("mode") in CUDA_GRAPH_MODES
        or given.get("backend") == "cudagraphs"
        or (more or {}).get("triton.cudagraphs")
    ):
        what = f"compile={value!r}: CUDA graphs are not supported: gathered weights move in memory"
        raise UsageError(
            what, where=PARALLELIZE, hint="use mode='default' or 'max-autotune-no-cudagraphs'"
        )
    return _require_names(None if globs is None else check_globs("compile's modules", globs)), given


def _require_names(globs: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if globs == ():
        hint = 'use compile=True for each unit, or ["blocks.*"]'
        raise UsageError("compile must name at least one module", where=PARALLELIZE, hint=hint)
    return globs


def _add_compiler_options(options: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return options with which torch's compiler overlaps collectives with computation (see
    `overlap_pass`), and with some more, which have priority.
    """
    if options.get("backend", "inductor") != "inductor":
        return options
    from torch._inductor import list_mode_options

    from pdrun.parallel.compiler.overlap_pass import OVERLAP_PASS

    # torch accepts a mode or options, not both; reordering for peak memory would undo the pass
    chosen = {
        **list_mode_options(options.get("mode") or "default"),
        **(options.get("options") or {}),
    }
    ours = {"post_grad_custom_post_pass": OVERLAP_PASS, "reorder_for_peak_memory": False}
    rest = {key: value for key, value in options.items() if key not in ("mode", "options")}
    return {**rest, "options": {**ours, **chosen, **more}}


def check_combination(compiled: list[str], recompute: Any, recomputed: list[str]) -> None:
    """Refuse options that compiled modules do not support."""
    if not compiled:
        return
    inner = [name for name in recomputed if any(name.startswith(f"{outer}.") for outer in compiled)]
    if inner:
        what = f"recompute={recompute!r} includes {inner[0]}, which is inside a compiled module"
        raise UsageError(
            what, where=PARALLELIZE, hint="recompute the compiled module, or one around it"
        )
    overlaps = any(
        f"{inner}.".startswith(f"{outer}.") for outer in recomputed for inner in compiled
    )
    if overlaps and parse_recompute(recompute).policy == "selective":
        what = "recompute='selective' is not supported in compiled modules: the compiler chooses"
        raise UsageError(what, where=PARALLELIZE, hint="leave recompute= out, or use 'full'")
    if overlaps and not parse_recompute(recompute).repeats_collectives:
        what = "mp_comm_recompute=False is not supported in compiled modules"
        raise UsageError(what, where=PARALLELIZE, hint="leave it out, or compile other modules")


def compile_modules(model: nn.Module, value: Any, defers: bool = False) -> list[str]:
    """
    Compile modules when they are first called; return their names.

    Args:
        defers: whether the pipeline's schedule defers gradients of weights.

    Raises:
        UsageError: see `parse_options`; or a glob matches no module.
    """
    parsed = parse_options(value)
    if parsed is None:
        if "torch._dynamo" in sys.modules:  # the program may compile parts of the model itself
            torch_compat.exclude_untraced()
        return []
    globs, options = parsed
    names = find_units(model, None) if globs is None else match_modules(model, globs, "compile")
    torch_compat.exclude_untraced()
    try:
        kinds = _add_compiler_options(options, KEEP_BUFFERS if defers else {})
        for name in names:
            module = model.get_submodule(name)
            wrap_forward(module, lambda forward: torch.compile(forward, **kinds))
            vars(module)[COMPILED_MARK] = True
    except (RuntimeError, torch._dynamo.exc.InvalidBackend) as error:
        what = f"compile={value!r}: {str(error).splitlines()[0]}"
        raise UsageError(
            what, where=PARALLELIZE, hint="see torch.compile's mode, backend and options"
        ) from error
    return names
