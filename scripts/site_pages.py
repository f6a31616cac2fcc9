"""
A hook of mkdocs: makes the page `api.md` from the docstrings of the public names.

Nothing is imported, so that the site is built without torch. The names are those of
`pdrun/__init__.py`; those that a package takes over from its modules are followed there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = "api.md"
GROUPS = (
    ("Start and restart", ("pdrun.launcher", "pdrun.elastic", "pdrun.worker_env")),
    ("In a script", ("pdrun.parallel.startup", "pdrun.parallel.comm")),
    ("Train", ("pdrun.parallel.parallelize", "pdrun.parallel.run", "pdrun.parallel.data")),
    ("Weights and optimizer", ("pdrun.parallel.zero", "pdrun.parallel.model")),
    ("Tensor parallel", ("pdrun.parallel.tensor",)),
    ("Operators and layouts", ("pdrun.parallel.operators", "pdrun.parallel.layouts")),
    (
        "Pipelines, sequences, experts",
        ("pdrun.parallel.pipeline", "pdrun.parallel.context_parallel"),
    ),
    ("Automatic plans", ("pdrun.parallel.auto",)),
    ("Parameter servers", ("pdrun.parallel.servers",)),
    ("Others", ("pdrun.parallel",)),
    ("Errors", ("pdrun.errors",)),
)
"""Title of a part, and the beginnings of the modules whose names it has; the first one counts."""
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Limits):\s*$")


class Definition(NamedTuple):
    """A public name: where it is defined."""

    name: str
    module: str
    node: ast.AST
    doc: str


def read_public_names(root: Path = ROOT) -> dict[str, str]:
    """Return each public name, and the module that `pdrun` takes it from."""
    tree = ast.parse((root / "pdrun" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "_MODULE_OF" and node.value is not None:
            return dict(ast.literal_eval(node.value))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_MODULE_OF":
            return dict(ast.literal_eval(node.value))
    raise ValueError("pdrun/__init__.py has no _MODULE_OF")


def find_file(module: str, root: Path = ROOT) -> Path | None:
    """Return the file of a module of pdrun; None: there is none."""
    parts = module.split(".")[1:]
    folders = [root.joinpath(*parts), root.joinpath("pdrun", *parts)]
    for folder in folders if parts else folders[1:]:
        for file in (folder / "__init__.py", folder.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def find_definition(name: str, module: str, root: Path = ROOT) -> Definition | None:
    """Return where a name of a module is defined; None: it is a module itself."""
    file = find_file(module, root)
    if file is None:
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for place, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(name, module, node, ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            after = tree.body[place + 1] if place + 1 < len(tree.body) else None
            doc = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                doc = str(after.value.value)
            return Definition(name, module, node, doc)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and alias.name != "annotations":
                    return find_definition(alias.name, node.module, root)
    return None


def format_signature(name: str, node: ast.FunctionDef, *, is_method: bool = False) -> str:
    """Return ``name(arguments) -> result``."""
    arguments = node.args
    if is_method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            arguments.posonlyargs,
            arguments.args[1:],
            arguments.vararg,
            arguments.kwonlyargs,
            arguments.kw_defaults,
            arguments.kwarg,
            arguments.defaults,
        )
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({ast.unparse(arguments)}){result}"
    if len(text) <= 90:
        return text
    parts = [f"    {part}," for part in _split_arguments(ast.unparse(arguments))]
    return "\n".join([f"{name}(", *parts, f"){result}"])


def _split_arguments(text: str) -> list[str]:
    depth, parts, begin = 0, [], 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]


def render_docstring(doc: str) -> Iterator[str]:
    """Yield a docstring as Markdown: sections become lists."""
    is_section = False
    entry = ""
    for line in [*doc.splitlines(), ""]:
        found = SECTION.match(line)
        if found:
            is_section = True
            yield from ("", f"**{found[1]}**", "")
            continue
        if is_section and line.startswith("    "):
            text = line[4:]
            if text.startswith("    ") and entry:
                entry += f" {text.strip()}"
                continue
            if entry:
                yield f"* {entry}"
            name, colon, rest = text.partition(": ")
            is_named = colon and re.fullmatch(r"[\w*`., ]+", name)
            entry = f"`{name}`: {rest}" if is_named else text
            continue
        if entry:
            yield f"* {entry}"
            entry = ""
        if line.strip() or not is_section:
            is_section = False
        yield line


def render_definition(found: Definition) -> Iterator[str]:
    """Yield the part of a page about a name."""
    yield from (f"### {found.name}", "")
    node = found.node
    if isinstance(node, ast.FunctionDef):
        yield from ("```python", format_signature(f"pdrun.{found.name}", node), "```", "")
    elif isinstance(node, ast.ClassDef):
        init = _find_method(node, "__init__")
        if init is not None:
            signature = format_signature(f"pdrun.{found.name}", init, is_method=True)
            signature = signature.removesuffix(" -> None")
            yield from ("```python", signature, "```", "")
        elif fields := list(_list_fields(node)):
            yield from ("```python", f"pdrun.{found.name}({', '.join(fields)})", "```", "")
    elif isinstance(node, ast.Assign):
        yield from ("```python", ast.unparse(node), "```", "")
    yield from render_docstring(found.doc)
    if not isinstance(node, ast.ClassDef):
        return
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        doc = ast.get_docstring(method) or ""
        decorators = {ast.unparse(one) for one in method.decorator_list}
        yield from ("", f"#### {found.name}.{method.name}", "")
        if "property" not in decorators:
            yield from (
                "```python",
                format_signature(method.name, method, is_method=True),
                "```",
                "",
            )
        yield from render_docstring(doc)


def _find_method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    methods = (one for one in node.body if isinstance(one, ast.FunctionDef))
    return next((one for one in methods if one.name == name), None)


def _list_fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a dataclass."""
    if not any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        return
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if not one.target.id.startswith("_"):
            default = f" = {ast.unparse(one.value)}" if one.value is not None else ""
            yield f"{one.target.id}: {ast.unparse(one.annotation)}{default}"


def render_reference(root: Path = ROOT) -> str:
    """Return the page of all public names."""
    lines = [
        "# API reference",
        "",
        "The public names of `pdrun`, from their docstrings. Only these are kept stable.",
        "",
        "    import pdrun",
        "",
    ]
    left = read_public_names(root)
    for title, modules in GROUPS:
        chosen = [name for name, module in left.items() if module.startswith(modules)]
        if not chosen:
            continue
        lines += [f"## {title}", ""]
        for name in sorted(chosen, key=str.lower):
            module = left.pop(name)
            found = find_definition(name, module, root)
            if found is None or (not found.doc and module.endswith(f".{name}")):
                lines += _render_module(name, module, root)
            else:
                lines += [*render_definition(found), ""]
    if left:
        raise ValueError(f"no part of the page has {', '.join(left)}")
    return "\n".join(lines)


def _render_module(name: str, module: str, root: Path) -> list[str]:
    """Return the part about a public module: its functions."""
    file = find_file(module, root)
    assert file is not None, module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lines = [f"### {name}", "", *render_docstring(ast.get_docstring(tree) or "")]
    exported = next((ast.literal_eval(node.value) for node in tree.body if _is_export(node)), None)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if exported is not None and node.name not in exported:
                continue
            signature = format_signature(f"pdrun.{name}.{node.name}", node)
            lines += ["", f"#### {name}.{node.name}", "", "```python", signature, "```", ""]
            lines += render_docstring(ast.get_docstring(node) or "")
    return lines


def _is_export(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=render_reference()))
    return files
