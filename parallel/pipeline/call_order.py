"""
The order in which a model calls its modules, read from the source of its ``forward`` methods.

Nothing is run: a split needs no batch. A forward whose source is not available, or that does not
name a module, leaves the order of definition.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

Path = tuple[str, ...]
UNCALLED_IN = frozenset(("len", "isinstance", "hasattr", "getattr"))
"""Functions that do not call the modules that they are given."""
UNCALLED_ATTRIBUTES = frozenset(("keys", "dtype", "device", "training", "requires_grad"))
"""What code reads from modules before it calls them."""


@dataclass
class ForwardUses:
    """
    What a module's forward uses from itself.

    Attributes:
        paths: of attributes, in order.
        interleaved: paths of lists that are iterated together: ``zip(self.a, self.b)``, or
            ``self.a[i]`` and ``self.b[i]`` in one loop.
    """

    paths: list[Path] = field(default_factory=list)
    interleaved: list[tuple[Path, ...]] = field(default_factory=list)


def sort_by_call(model: nn.Module, names: Sequence[str]) -> list[str]:
    """
    Return names of modules in the order in which the model's forward first uses them.

    Args:
        names: in the order of definition. One that is not found stays after its predecessor.
    """
    keys: dict[str, tuple[int, ...]] = {}
    uses: dict[str, ForwardUses] = {}
    for name in names:
        keys[name] = tuple(_position_keys(model, name, uses))
    return sorted(names, key=lambda name: keys[name])


def find_weight_reads(model: nn.Module, units: Sequence[str]) -> list[str]:
    """
    Return the weights of units that the forward of a module around them reads by name, or those of
    a module inside a unit that it calls.
    """
    found: dict[str, None] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    around = {unit.rpartition(".")[0] for unit in units}
    for name in list(around):
        around.update(".".join(name.split(".")[:end]) for end in range(name.count(".") + 1))
    for name in sorted(around):
        for path in _find_uses(model.get_submodule(name)).paths:
            # self.emb.weight and self.emb.weight.T, but not self.emb.weight.dtype
            kept = path[:-1] if path[-1] in ("T", "t", "mT") else path
            full = ".".join((name, *kept) if name else kept)
            if not any(full.startswith(f"{unit}.") for unit in units):
                continue
            if full in params:
                found.setdefault(full)
            elif full in modules:
                found.update(dict.fromkeys(key for key in params if key.startswith(f"{full}.")))
    return list(found)


def _position_keys(model: nn.Module, name: str, uses: dict[str, ForwardUses]) -> Iterator[int]:
    """
    Yield, for each called module around a name, where the forward of the module around it uses it,
    and its place among the children there. Lists and dicts of modules are not called.
    """
    owner, owner_name = model, ""
    inside: Path = ()
    indices: list[int] = []
    siblings: list[str] = []
    module = model
    for piece in name.split("."):
        siblings = list(module._modules)
        inside = (*inside, piece)
        indices.append(siblings.index(piece))
        child = module._modules[piece]
        assert child is not None  # it has a name
        module = child
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if owner_name not in uses:
            uses[owner_name] = _find_uses(owner)
        used = uses[owner_name]
        together = _find_interleaved(inside, used)
        if together is None:
            yield _place_of(inside, siblings, used.paths)
            yield from indices
        else:  # the first of each list, the second of each list, ...
            group, place, length = together
            yield used.paths.index(group[0])
            yield indices[length]
            yield place
            yield from indices[length + 1 :]
        owner, owner_name = module, f"{owner_name}.{'.'.join(inside)}".lstrip(".")
        inside, indices = (), []


def _find_interleaved(inside: Path, used: ForwardUses) -> tuple[tuple[Path, ...], int, int] | None:
    """Return the lists that are iterated together, which of them a path is in, and its length."""
    for group in used.interleaved:
        for place, path in enumerate(group):
            if len(inside) > len(path) and inside[: len(path)] == path:
                return group, place, len(path)
    return None


def _place_of(inside: Path, siblings: Sequence[str], used: list[Path]) -> int:
    """
    Return the place of a child among the paths that a forward uses.

    A child that is not used by name has that of the sibling defined before it.
    """
    *around, piece = inside
    for sibling in reversed(siblings[: siblings.index(piece) + 1]):
        wanted = (*around, sibling)
        for place, path in enumerate(used):
            length = min(len(path), len(wanted))
            if path[:length] == wanted[:length]:
                return place
    return -1


def _find_uses(module: nn.Module) -> ForwardUses:
    """Return what a module's forward uses from itself."""
    kind = type(module)
    if isinstance(module, nn.Sequential) or kind.forward is nn.Module.forward:
        return ForwardUses()
    collector = _PathCollector(kind)
    collector.collect_method("forward")
    return collector.uses


class _PathCollector(ast.NodeVisitor):
    """Collects what a method and the methods that it calls read from ``self``."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.uses = ForwardUses()
        self._methods: set[str] = set()

    def collect_method(self, name: str) -> None:
        """Add the paths of a method, once."""
        if name in self._methods:
            return
        self._methods.add(name)
        tree = _parse_method(inspect.getattr_static(self.kind, name, None))
        if tree is not None:
            for statement in tree.body:
                self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        """Visit arguments before the call: they are computed first."""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        if function in UNCALLED_IN:
            return
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(value)
        self.visit(node.func)
        if function == "zip":
            lists = [_path_from_self(value) for value in node.args]
            group = tuple(path for path in lists if path in self.uses.paths)
            if len(group) > 1:
                self.uses.interleaved.append(group)

    def visit_For(self, node: ast.For) -> None:
        """Add the lists of which a loop uses the same member each time."""
        self.generic_visit(node)
        group = tuple(path for path in _lists_of_loop(node) if path in self.uses.paths)
        if len(group) > 1:
            self.uses.interleaved.append(group)

    def visit_With(self, node: ast.With) -> None:
        """Visit calls of modules only where no gradients are computed: the rest changes weights."""
        if not any("no_grad" in ast.unparse(item.context_expr) for item in node.items):
            self.generic_visit(node)
            return
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _path_from_self(call.func) is not None:
                self.visit(call)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Leave out ``self.a is None``."""
        if not all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value only."""
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Add a path from ``self``, or what a method of this name uses."""
        path = _path_from_self(node)
        if path is None:
            self.generic_visit(node)
            return
        method = inspect.getattr_static(self.kind, path[0], None)
        if inspect.isfunction(method) or isinstance(method, (property, staticmethod)):
            self.collect_method(path[0])
        elif len(path) == 1 or path[-1] not in UNCALLED_ATTRIBUTES:
            self.uses.paths.append(path)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Add a path with constant keys."""
        path = _path_from_self(node)
        if path is None:
            self.generic_visit(node)
        else:
            self.uses.paths.append(path)


def _lists_of_loop(node: ast.For) -> list[Path]:
    """Return the lists whose members a loop names by its variable, in the order of their use."""
    target, iterated = node.target, node.iter
    members: dict[str, Path] = {}
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:  # for i, a in enumerate(self.a)
        target, element = target.elts
        given = iterated.args[0] if isinstance(iterated, ast.Call) and iterated.args else iterated
        path = _path_from_self(given)
        if isinstance(element, ast.Name) and path is not None:
            members[element.id] = path
    if not isinstance(target, ast.Name):
        return []
    found: dict[Path, None] = {}
    for statement in node.body:
        for each in _walk_as_computed(statement):
            if isinstance(each, ast.Name) and each.id in members:
                found.setdefault(members[each.id])
            elif isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Name):
                path = _path_from_self(each.value)
                if path is not None and each.slice.id == target.id:
                    found.setdefault(path)
    return list(found)


def _walk_as_computed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside of one, arguments before the function that takes them."""
    inside = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        inside = [*inside[1:], inside[0]]
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        inside = [node.value]
    for child in inside:
        yield from _walk_as_computed(child)
    yield node


def _path_from_self(node: ast.expr) -> Path | None:
    """Return the path of ``self.a.b`` or ``self.a["b"]``; None for other expressions."""
    pieces: list[str] = []
    while True:
        if isinstance(node, ast.Attribute):
            pieces.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            pieces.append(str(node.slice.value))
            node = node.value
        else:
            break
    if not pieces or not isinstance(node, ast.Name) or node.id != "self":
        return None
    return tuple(reversed(pieces))


@functools.lru_cache(maxsize=1024)
def _parse_method(method: object) -> ast.FunctionDef | None:
    """Return the syntax tree of a method; None without source."""
    if isinstance(method, property):
        method = method.fget
    if isinstance(method, staticmethod):
        method = method.__func__
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0]
    return first if isinstance(first, ast.FunctionDef) else None
