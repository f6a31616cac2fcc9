"""
Export equal layers once. An export takes milliseconds per operator, and a deep model has many equal
layers.

While a model is exported, members of its lists that are equal to an earlier one (same classes, same
attributes, weights of the same shapes) do not run. The first is enclosed in marks. Each other one
leaves one node in its place, with results of the same shapes. The reader of the graph inserts the
operators of the first layer there, with the names and weights of the other.

Equality is checked, never assumed. A layer is exported separately if

* an attribute differs
* it shares a weight with something outside
* it is called with other shapes or values

If a layer takes an activation that is not one of its arguments, the full model is exported without
folding (`FoldError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.operators.graph.constraints import OP_LIBRARY

MIN_GROUP_SIZE = 3
"""Members that a group must have."""

OP_LIBRARY.define("mark_layer(Tensor[] tensors, str path) -> ()")
OP_LIBRARY.define("repeat_layer(Tensor[] tensors, str path, str first) -> Tensor[]")


@dataclass
class _FirstLayer:
    """The call of the first of some equal modules."""

    path: str
    call: Any = None
    """The key of its arguments and of its state."""
    results: tuple[torch.Tensor, ...] = ()
    leaves: tuple[Any, ...] = ()
    structure: Any = None


_first_layers: dict[str, _FirstLayer] = {}
"""Of the current export, by path."""


def _mark_layer(tensors: list[torch.Tensor], path: str) -> None:
    """Mark the start or the end of the first layer: its inputs, then its results."""


def _repeat_layer(tensors: list[torch.Tensor], path: str, first: str) -> list[torch.Tensor]:
    """Stand-ins for the results of an equal layer."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _first_layers[first].results
    ]


OP_LIBRARY.impl("mark_layer", _mark_layer, "CompositeExplicitAutograd")
OP_LIBRARY.impl("repeat_layer", _repeat_layer, "CompositeExplicitAutograd")


class FoldError(Exception):
    """A folded graph would differ from the graph of the model."""


@contextmanager
def fold_equal_layers(model: nn.Module) -> Iterator[bool]:
    """
    While this lasts, calls of equal members of lists leave a node each. Yields whether there are
    any.
    """
    groups = find_equal_layers(model)
    patched = []
    try:
        for paths in groups:
            first = _first_layers[paths[0]] = _FirstLayer(paths[0])
            for path in paths:
                module = model.get_submodule(path)
                module.forward = _wrap_forward(module, module.forward, path, first)
                patched.append(module)
        yield bool(groups)
    finally:
        for module in patched:
            del module.forward
        _first_layers.clear()


def _wrap_forward(
    module: nn.Module, forward: Callable[..., Any], path: str, first: _FirstLayer
) -> Callable[..., Any]:
    def folded_forward(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        call_key = _call_signature(leaves, structure)
        state = _object_state(module)
        if call_key is not None:
            call_key = (call_key, state)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if call_key is not None and path != first.path and call_key == first.call:
            new_tensors = iter(torch.ops.pdrun.repeat_layer(tensors, path, first.path))
            results = [
                next(new_tensors) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in first.leaves
            ]
            return pytree.tree_unflatten(results, first.structure)
        if call_key is None or path != first.path or first.call is not None:
            return forward(*args, **kwargs)
        torch.ops.pdrun.mark_layer(tensors, path)
        output = forward(*args, **kwargs)
        result_leaves, result_structure = pytree.tree_flatten(output)
        results = [leaf for leaf in result_leaves if isinstance(leaf, torch.Tensor)]
        torch.ops.pdrun.mark_layer(results, path)
        if _object_state(module) == state and all(
            isinstance(leaf, torch.Tensor) or _is_plain(leaf) for leaf in result_leaves
        ):
            first.call, first.results = call_key, tuple(results)
            first.leaves = tuple(result_leaves)
            first.structure = result_structure
        return output

    return folded_forward


def _call_signature(leaves: list[Any], structure: Any) -> Any:
    """Return a key of the arguments of a call; None if a value cannot be compared."""
    parts: list[Any] = [structure]
    seen: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            first_index = seen.setdefault(id(leaf), len(seen))
            parts.append(
                (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, first_index)
            )
        elif _is_plain(leaf):
            parts.append((type(leaf), leaf))
        else:
            return None
    return parts, torch.is_grad_enabled()


def _object_state(module: nn.Module) -> Any:
    """
    Return a key of the objects that a module has apart from weights: a call can depend on them, or
    change them.

    Layers that share such an object (a list of auxiliary losses, a counter) are equal. Their calls
    are not.
    """
    return [
        (name, _state_key(value, 3))
        for each in module.modules()
        for name, value in each.__dict__.items()
        if name not in _MODULE_ATTRIBUTES and name != "forward"
    ]


def _state_key(value: Any, depth: int) -> Any:
    if _is_plain(value):
        return value
    if depth == 0 or isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value):
        return id(value)
    inside = getattr(value, "__dict__", {})
    if isinstance(value, dict):
        inside = value
    items: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    named = [
        (_state_key(key, depth - 1), _state_key(item, depth - 1))
        for key, item in list(inside.items())
    ]
    return type(value), [_state_key(item, depth - 1) for item in items], named


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


# ---- which modules are equal ------------------------------------------------


def find_equal_layers(model: nn.Module) -> list[list[str]]:
    """
    Return the paths of equal members of the outermost lists, by group. Each group has at least
    `MIN_GROUP_SIZE`.

    Members without submodules are skipped: they are an operator or two.
    """
    names: dict[int, list[str]] = {}
    for kind in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in kind:
            names.setdefault(id(tensor), []).append(name)
    layer_groups: list[list[str]] = []

    def walk(module: nn.Module, path: str) -> None:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < MIN_GROUP_SIZE:
            for name, child in module.named_children():
                walk(child, f"{path}.{name}" if path else name)
            return
        groups: dict[Any, list[str]] = {}
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if "forward" in child.__dict__ or not _owns_its_tensors(child, child_path, names):
                continue
            key = _module_key(child, child_path, names)
            if child._modules:
                groups.setdefault(key, []).append(child_path)
        layer_groups.extend(paths for paths in groups.values() if len(paths) >= MIN_GROUP_SIZE)

    walk(model, "")
    return layer_groups


def _owns_its_tensors(module: nn.Module, path: str, names: dict[int, list[str]]) -> bool:
    """Return whether all uses of a module's weights and buffers are inside the module."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(name.startswith(f"{path}.") for tensor in tensors for name in names[id(tensor)])


_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
"""The attributes that every module has."""


def _module_key(
    module: nn.Module, path: str, names: dict[int, list[str]], inside: bool = False
) -> Any:
    """
    Return a key that is equal for modules that compute the same. Hooks of the outermost module run
    outside it.
    """
    hooks = [
        value
        for name, value in module.__dict__.items()
        if name in _MODULE_ATTRIBUTES and "hooks" in name and value
    ]
    if inside and (hooks or "forward" in module.__dict__):
        return id(module)
    states = tuple(
        (
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            _relative_name(names[id(tensor)][0], path),
        )
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    )
    attributes = tuple(
        (name, _attribute_key(value))
        for name, value in sorted(module.__dict__.items())
        if name not in _MODULE_ATTRIBUTES
    )
    children = tuple(
        (name, None if child is None else _module_key(child, path, names, True))
        for name, child in module._modules.items()
    )
    return type(module), module.training, states, attributes, children


def _relative_name(name: str, path: str) -> str:
    return name.removeprefix(f"{path}.")


def _attribute_key(value: Any) -> Any:
    """
    Return a key of an attribute that is equal for equal values. For other than plain values it is
    the object's id.
    """
    if _is_plain(value):
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return type(value), tuple(map(_attribute_key, value))
    if type(value) is dict:
        return dict, tuple(
            (_attribute_key(key), _attribute_key(item)) for key, item in value.items()
        )
    return id(value)
