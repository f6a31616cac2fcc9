"""
Styles for a model of which nothing is known: what can be sharded alone.

A linear module or a convolution computes a shard of its output, which is gathered, and an embedding
a part of its vocabulary. So the code between modules gets the same tensors as on one device,
whatever it does. Everything else, such as attention, is computed in full on every rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.tensor import linear
from pdrun.parallel.tensor.convolution import ChannelStyle, is_plain_convolution
from pdrun.parallel.tensor.probes import check_embedding
from pdrun.parallel.tensor.style import AxisNames, ModuleStyle, check_forward
from pdrun.parallel.tensor.styles import col, vocab

MIN_SPLIT_SIZE = 8
"""Smaller outputs and vocabularies stay full: hosts have up to 8 devices."""
MIN_WEIGHT_SHARE = 1 / 256
"""Of the largest weight; smaller ones are not worth a collective."""
NAMES_OF_WEIGHTS = frozenset(("weight", "bias"))
WEIGHT_READ = re.compile(
    r"\bself((?:\.\w+)*\.(?:weight|bias))\b(?!\s*=[^=]|\.(?:dtype|device|requires_grad)\b)"
)
"""A weight that a method reads; assignments set it, and its type is the same for a shard."""
LOCAL_READ = re.compile(
    r"(?<![\w.])(?!self\b)\w+\.weight\b(?!\s*=[^=]|\.(?:dtype|device|requires_grad)\b)"
)
"""A weight of a module that a method was given or has in a variable."""
SETUP_NAMES = re.compile("init|tie|reset|embeddings$")
"""Methods that run before a model is sharded."""


def style_any_model(
    model: nn.Module, axis: AxisNames, gather: bool = True, inside: str = ""
) -> dict[str, ModuleStyle]:
    """
    Return styles by names of modules and weights; empty if nothing can be sharded.

    Args:
        axis: the tensor axis, or several, major first.
        gather: False leaves the logits of the model's head sharded.
        inside: the name of a module: styles of this and what is inside it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    largest = max((param.numel() for param in model.parameters()), default=0)
    hidden = _find_hidden_weights(modules)
    candidates = {
        name: module
        for name, module in modules.items()
        if name
        and (name == inside or name.startswith(f"{inside}." if inside else ""))
        and _is_shardable(name, module, largest)
        and not any(id(param) in hidden for param in module.parameters())
    }
    names_of: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    head = _find_head(model)
    styles: dict[str, ModuleStyle] = {}
    for name, module in candidates.items():
        ties = {id(param): names_of[id(param)] for param in module.parameters()}
        others = {
            owner
            for names in ties.values()
            for owner in (each.rpartition(".")[0] for each in names)
            if modules[owner] is not module
        }
        aliases = [
            other
            for names in ties.values()
            for other in names
            if not _is_leaf(modules[other.rpartition(".")[0]])
        ]
        is_tied = bool(others)
        if isinstance(module, nn.Embedding) or module is head or is_tied:
            if linear.is_transposed(module) or is_plain_convolution(module):
                continue
            if any(_is_leaf(modules[owner]) and owner not in candidates for owner in others):
                continue  # another module would compute with a shard
            styles[name] = vocab(axis, gather=gather)
            styles.update(dict.fromkeys(aliases, vocab(axis, gather=gather)))
        elif is_plain_convolution(module):
            styles[name] = ChannelStyle(axis)
        else:
            styles[name] = col(axis, gather=True)
    return styles


def _is_leaf(module: nn.Module) -> bool:
    """Whether a module has weights and nothing inside."""
    is_layer = linear.is_linear(module) or is_plain_convolution(module)
    return is_layer or isinstance(module, nn.Embedding)


def _find_head(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the logits of a model of transformers."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def _is_shardable(name: str, module: nn.Module, largest: int) -> bool:
    """Whether a module can compute a shard of its output alone, and is worth it."""
    try:
        if isinstance(module, nn.Embedding):
            check_embedding(name, module)
            split_size = module.weight.shape[0]
        elif is_plain_convolution(module):
            check_forward(name, module)
            split_size = module.weight.shape[0]
        elif linear.is_linear(module):
            check_forward(name, module)
            split_size = int(module.weight.shape[linear.out_dim(name, module)])
        else:
            return False
    except (UsageError, AttributeError):  # parametrized, quantised, or with a forward of its own
        return False
    is_worth_it = module.weight.numel() >= MIN_WEIGHT_SHARE * largest
    return bool(split_size >= MIN_SPLIT_SIZE and is_worth_it)


def _find_hidden_weights(modules: dict[str, nn.Module]) -> set[int]:
    """Return the ids of weights that other code than their module's forward reads."""
    found: set[int] = set()
    paths: dict[type, list[tuple[str, ...]]] = {}
    is_local_read = False
    for module in modules.values():
        if isinstance(module, nn.MultiheadAttention):  # uses its weights, not its modules
            found.update(id(param) for param in module.parameters())
        if _is_leaf(module):
            continue
        kind = type(module)
        if kind not in paths:
            sources = list(_sources(kind))
            is_local_read |= any(LOCAL_READ.search(source) for source in sources)
            paths[kind] = list(_weights_read(sources))
        for path in paths[kind]:
            found.update(id(param) for param in _resolve(module, path))
    if is_local_read:  # most often an embedding, for logits
        embeddings = (each for each in modules.values() if isinstance(each, nn.Embedding))
        found.update(id(each.weight) for each in embeddings)
    return found


def _resolve(module: nn.Module, path: tuple[str, ...]) -> Iterator[nn.Parameter]:
    value: object = module
    for piece in path:
        value = getattr(value, piece, None)
    if isinstance(value, nn.Parameter):
        yield value


def _weights_read(sources: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of weights that methods read from ``self``."""
    for source in sources:
        for match in WEIGHT_READ.finditer(source):
            yield tuple(match.group(1).lstrip(".").split("."))


def _sources(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the source of the methods of a class that may read weights while it computes."""
    for each in kind.__mro__:
        if each is nn.Module or each.__module__ == "transformers.modeling_utils":
            return
        for name, method in vars(each).items():
            if not inspect.isfunction(method) or SETUP_NAMES.search(name):
                continue
            if not NAMES_OF_WEIGHTS.isdisjoint(_names_in(method.__code__)):
                try:
                    yield inspect.getsource(method)
                except (OSError, TypeError):  # made at run time
                    continue


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes that a function uses, those of its inner functions too."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*(_names_in(each) for each in inner))
