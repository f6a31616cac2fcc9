"""
Matrix products fused with a neighbouring collective, in the graphs of torch.compile: see
`pdrun.parallel.comm.overlapped_matmul`.

    whole = all_gather(x)   y = mm(whole, w)          y = all_gather_matmul(x, whole, w)
    part = reduce_scatter(mm(h, w) + mm(g, v))        part = matmul_reduce_scatter([h, g], [w, v])

`overlap_pass` calls it when it splits collectives into start and wait.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from pdrun.parallel.comm import custom_ops

MIN_BYTES = 1 << 22
"""Bytes of the full tensor from which a product is split for a collective."""
ATEN = torch.ops.aten
VIEWS = (ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default)
WEIGHT_VIEWS = (*VIEWS, ATEN.permute.default, ATEN.t.default, ATEN.transpose.int)
"""Operators between a weight and a product."""
MATMULS = (ATEN.mm.default, ATEN.addmm.default)


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor that describes a node's result."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def count_bytes(value: torch.Tensor) -> float:
    """Return the approximate bytes of a tensor."""
    return count_elements(value) * float(value.element_size())


def count_elements(value: torch.Tensor) -> float:
    """Return the approximate number of elements of a tensor."""
    return math.prod(size_hint(size) for size in value.shape)


def size_hint(size: Any) -> float:
    """Return a size; a symbolic size counts as large."""
    if isinstance(size, int):
        return float(size)
    return float(getattr(size.node, "hint", None) or 1024)


def is_worth_splitting(node: fx.Node) -> bool:
    """Whether a product is split for a collective: on an accelerator, if it can hide enough."""
    value = value_of(node)
    return value is not None and value.is_cuda and count_bytes(value) >= MIN_BYTES


def find_readers(node: fx.Node) -> list[fx.Node]:
    """
    Return the products that read what a node gathers, and could start before it has arrived.

    These have it as rows of their left operand, and a weight on the right.
    """
    value = value_of(node)
    if (
        node.target is not custom_ops.ALL_GATHER_OP
        or value is None
        or not is_worth_splitting(node)
        or not 0 <= node.args[2] < value.dim() - 1
    ):
        return []
    views = [user for user in node.users if user.target in VIEWS] if value.dim() > 2 else [node]
    found = []
    for view in views:
        rows = value_of(view)
        if (
            rows is not None
            and rows.dim() == 2
            and size_hint(rows.shape[1]) == size_hint(value.shape[-1])
        ):
            found += [
                user for user in view.users if user.target in MATMULS and user.args[-2] is view
            ]
    return [
        each for each in found if weight_chain(each.args[-1]) and not each.kwargs and _is_row(each)
    ]


def _is_row(product: fx.Node) -> bool:
    """Whether the term that a product is added to, if any, is a bias."""
    return len(product.args) == 2 or getattr(value_of(product.args[0]), "ndim", 0) == 1


def weight_chain(node: Any) -> list[fx.Node]:
    """
    Return a node and the nodes that it is a view of, up to an input of the graph; empty for other
    nodes.
    """
    chain = []
    while isinstance(node, fx.Node):
        chain.append(node)
        if node.op == "placeholder":
            return chain
        if node.target not in WEIGHT_VIEWS:
            break
        node = node.args[0]
    return []


def fuse_gather(
    graph: fx.Graph, started: fx.Node, products: list[fx.Node], first: fx.Node
) -> list[fx.Node]:
    """
    Make products start with this rank's part, before ``first``; return the nodes with their
    results.
    """
    part, axis, dim = started.args[:3]
    with graph.inserting_before(first):
        weights = [product.args[-1] for product in products]
        joint = graph.call_function(
            custom_ops.ALL_GATHER_MATMUL_OP, (part, started, axis, dim, weights)
        )
        joint.meta["val"] = [product.meta["val"] for product in products]
        made = [
            graph.call_function(operator.getitem, (joint, number))
            for number in range(len(products))
        ]
    for product, result in zip(products, made, strict=True):
        _copy_meta(result, product)
        if product.target is ATEN.addmm.default:
            with graph.inserting_before(product):
                result = graph.call_function(ATEN.add.Tensor, (result, product.args[0]))
            _copy_meta(result, product)
        product.replace_all_uses_with(result)
        graph.erase_node(product)
    return made


def fuse_scatters(graph: fx.Graph) -> None:
    """Replace sums over ranks of products by partial products, if only this rank's part is read."""
    for node in list(graph.nodes):
        if node.target is not custom_ops.REDUCE_SCATTER_OP or not is_worth_splitting(node.args[0]):
            continue
        terms = _sum_terms(node.args[0], node)
        value = value_of(node.args[0])
        if not terms or value is None or not 0 <= node.args[2] < value.dim() - 1:
            continue
        shape = next((way[0].args[1] for way, _ in terms if way), [-1, value.shape[-1]])
        inputs, weights = zip(*(product.args for _, product in terms), strict=True)
        with graph.inserting_before(node):
            axis, dim = node.args[1:3]
            joint = graph.call_function(
                custom_ops.MATMUL_REDUCE_SCATTER_OP, (list(inputs), axis, list(weights), shape, dim)
            )
            _copy_meta(joint, node)
        whole = node.args[0]
        node.replace_all_uses_with(joint)
        graph.erase_node(node)
        for each in (
            *_nested_sums(whole),
            *(each for way, product in terms for each in (*way, product)),
        ):
            graph.erase_node(each)


def _copy_meta(node: fx.Node, other: fx.Node) -> None:
    """
    Copy the description of a node's result to another node; arguments differ and are not copied.
    """
    node.meta.update({key: other.meta[key] for key in ("val", "stack_trace") if key in other.meta})


def _nested_sums(node: Any) -> list[fx.Node]:
    """Return a sum and the sums that it consists of, outer ones first."""
    if node.target is not ATEN.add.Tensor:
        return []
    return [node, *(each for arg in node.args[:2] for each in _nested_sums(arg))]


def _sum_terms(node: Any, user: fx.Node) -> list[tuple[list[fx.Node], fx.Node]]:
    """Return the products that a node is the sum of, each with its view; empty for other nodes."""
    if not isinstance(node, fx.Node) or list(node.users) != [user]:
        return []
    if node.target is ATEN.mm.default:
        return [([], node)]
    if (
        node.target in VIEWS
        and isinstance(node.args[0], fx.Node)
        and node.args[0].target is ATEN.mm.default
    ):
        if list(node.args[0].users) == [node]:
            return [([node], node.args[0])]
        return []
    if node.target is ATEN.add.Tensor and not node.kwargs and node.args[0] is not node.args[1]:
        terms = [_sum_terms(each, node) for each in node.args[:2]]
        left, right = map(value_of, node.args[:2])
        if all(terms) and left is not None and right is not None and left.shape == right.shape:
            return [term for some in terms for term in some]
    return []
