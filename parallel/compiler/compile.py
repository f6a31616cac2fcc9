"""
torch.compile, module by module.

    True                    each unit (member of a ModuleList or Sequential)
    ["blocks.*"]            the modules of these names
    {"mode": "max-autotune-no-cudagraphs", "modules": ["blocks.*"]}     options of torch.compile, and which modules

Compiling happens on this rank's part of the model, once everything is cut, and inside of what
happens around a unit: hooks, recomputation, gathered weights. Collectives of tensor axes are
operators in the graph (see `traced`). Modules of one kind share their code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.model.forward_wrapper import wrap_forward
from pdrun.parallel.model.recompute import match_modules
from pdrun.parallel.model.weights import find_units
from pdrun.parallel.zero.settings import PARALLELIZE, check_globs

COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def parse_options(value: Any) -> tuple[tuple[str, ...] | None, dict[str, Any]] | None:
    """
    Return globs (None: units) and torch.compile's options; None where nothing is to be compiled.

    Raises:
        UsageError: the value is neither of the forms above.
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
        what = f"compile={value!r}: torch.compile has no {', '.join(wrong)}"
        raise UsageError(what, where=PARALLELIZE, hint=f"modules, {', '.join(COMPILE_OPTIONS)}")
    more = given.get("options")
    if more is not None and not isinstance(more, Mapping):
        what = f"compile={value!r}: options={more!r} is no dict"
        raise UsageError(what, where=PARALLELIZE, hint='{"options": {"max_autotune": True}}')
    if (
        given.get("mode") in CUDA_GRAPH_MODES
        or given.get("backend") == "cudagraphs"
        or (more or {}).get("triton.cudagraphs")
    ):
        what = f"compile={value!r}: CUDA graphs keep the places of weights, which move when they are gathered"
        raise UsageError(
            what, where=PARALLELIZE, hint="mode='default' or 'max-autotune-no-cudagraphs'"
        )
    return _require_names(None if globs is None else check_globs("compile's modules", globs)), given


def _require_names(globs: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if globs == ():
        hint = 'compile=True for each unit, or ["blocks.*"]'
        raise UsageError("compile= names no modules", where=PARALLELIZE, hint=hint)
    return globs


def _add_overlap_pass(options: dict[str, Any]) -> dict[str, Any]:
    """
    Return options by which torch's own compiler puts collectives beside computation (see
    `overlap`).
    """
    if options.get("backend", "inductor") != "inductor":
        return options
    from torch._inductor import list_mode_options

    from pdrun.parallel.compiler.overlap_pass import OVERLAP_PASS

    # torch takes a mode or options, not both; an order for less memory would undo ours
    chosen = {
        **list_mode_options(options.get("mode") or "default"),
        **(options.get("options") or {}),
    }
    ours = {"post_grad_custom_post_pass": OVERLAP_PASS, "reorder_for_peak_memory": False}
    rest = {key: value for key, value in options.items() if key not in ("mode", "options")}
    return {**rest, "options": {**ours, **chosen}}


def check_combination(
    compiled: list[str], recompute: Any, recomputed: list[str], splits: bool
) -> None:
    """
    Refuse what cannot go together with compiled modules.

    Args:
        splits: whether the pipeline's schedule leaves gradients of weights for later.
    """
    if not compiled:
        return
    inner = [name for name in recomputed if any(name.startswith(f"{outer}.") for outer in compiled)]
    if inner:
        what = f"recompute={recompute!r} has {inner[0]}, which lies in a compiled module, computed again"
        raise UsageError(
            what, where=PARALLELIZE, hint="recompute what is compiled, or something around it"
        )
    selective = recompute == "selective" or (
        isinstance(recompute, tuple) and recompute[1:] == ("selective",)
    )
    if selective and any(
        f"{inner}.".startswith(f"{outer}.") for outer in recomputed for inner in compiled
    ):
        what = "recompute='selective' in compiled modules: a compiler chooses by itself what is computed again"
        raise UsageError(what, where=PARALLELIZE, hint="leave recompute= out, or recompute='full'")
    if splits:
        what = "compile= beside a schedule that leaves gradients of weights for later, which a compiled backward cannot"
        raise UsageError(what, where=PARALLELIZE, hint="schedule='1f1b' or 'interleaved'")


def compile_modules(model: nn.Module, value: Any) -> list[str]:
    """
    Have modules compiled when they are first called; return their names.

    Raises:
        UsageError: see `parse`; or a glob that matches no module.
    """
    parsed = parse_options(value)
    if parsed is None:
        return []
    globs, options = parsed
    names = find_units(model, None) if globs is None else match_modules(model, globs, "compile")
    torch_compat.exclude_untraced()
    try:
        kinds = _add_overlap_pass(options)
        for name in names:
            wrap_forward(model.get_submodule(name), lambda forward: torch.compile(forward, **kinds))
    except (RuntimeError, torch._dynamo.exc.InvalidBackend) as error:
        what = f"compile={value!r}: {str(error).splitlines()[0]}"
        raise UsageError(
            what, where=PARALLELIZE, hint="see torch.compile's mode, backend and options"
        ) from error
    return names
