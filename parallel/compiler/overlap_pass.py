"""
Overlaps collectives of compiled layers with computation: a pass over the graphs of torch.compile.

    before   dx = mm(dy, w)  dw = mm(dy.t, x)  part = reduce_scatter(dx)  ... part ...
    after    dx = mm(dy, w)  part = start(dx)  dw = mm(dy.t, x)  wait(part)  ... part ...

In the backward of a sharded layer, gradients of weights depend on no collective, and nothing in the
layer depends on them. They are deferred until a collective runs, as many as are needed to hide it.
Each collective starts as soon as its input exists, and is waited for before its first use.
(Megatron-LM does that by hand for its linear layers.) Nothing moves past a node that writes into a
tensor.

    before   whole = all_gather(x)  y = mm(whole, w)
    after    whole = start(x)  y = all_gather_matmul(x, whole, w)

    before   y = mm(h, w)  part = reduce_scatter(y)
    after    part = matmul_reduce_scatter(h, w)

In a forward little can be deferred. There the product that reads a gathered tensor starts with this
rank's part, and the product that is summed over the ranks ends with it: see `overlapped_matmul`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from pdrun.parallel.comm import axis_members, custom_ops
from pdrun.parallel.comm.axis_members import axis_size_of
from pdrun.parallel.compiler import matmul_pass
from pdrun.parallel.compiler.matmul_pass import (
    count_bytes,
    count_elements,
    find_readers,
    fuse_gather,
    fuse_scatters,
    size_hint,
    value_of,
    weight_chain,
)

FLOPS_PER_SECOND = 7e14
BYTES_PER_SECOND = 2e11
"""
Operations per second and device, and bytes per second between two devices: those of an H200.

A collective that finds all processors busy starts when the product before it ends. One product too
many beside it is better than one too few.
"""
MATMUL_NAMES = ("mm", "addmm", "bmm", "baddbmm")


class OverlapPass(CustomGraphPass):
    """The pass; see `torch._inductor.config.post_grad_custom_post_pass`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder a graph, and split its collectives into start and wait."""
        if not any(node.target in custom_ops.START_OPS for node in graph.nodes):
            return
        fuse_scatters(graph)
        collectives = [node for node in graph.nodes if node.target in custom_ops.START_OPS]
        beside: dict[fx.Node, list[fx.Node]] = {node: [] for node in collectives}
        order = list(_order_nodes(graph, beside))
        for before, after in pairwise(order):
            before.append(after)
        taken = {other for others in beside.values() for other in others}
        for node, others in beside.items():
            _split_collective(
                graph, node, others, [each for each in find_readers(node) if each not in taken]
            )

    def uuid(self) -> Any:
        """
        Return the cache key of compiled code: the contents of these files, and the cost threshold.
        """
        return get_hash_for_files(
            (__file__, matmul_pass.__file__, custom_ops.__file__, axis_members.__file__),
            str(matmul_pass.MIN_BYTES),
        )


OVERLAP_PASS = OverlapPass()
"""One instance for all compiled modules, so that compiled code is found in the cache."""


def _order_nodes(graph: fx.Graph, collectives: dict[fx.Node, list[fx.Node]]) -> Iterator[fx.Node]:
    """
    Yield the nodes in their new order: unchanged, but for nodes that can run beside a collective,
    or at the end.

    Args:
        collectives: for each collective, the list to which nodes that run beside it are added.
    """
    nodes = list(graph.nodes)
    loose = _find_deferrable(nodes)
    waiting: list[fx.Node] = []
    on_way: dict[fx.Node, float] = {}
    """Collectives in progress, and the seconds that they may take."""

    def beside(enough: float) -> Iterator[fx.Node]:
        spent = 0.0
        blocked = set(on_way)
        for node in list(waiting):
            if spent >= enough or blocked.intersection(node.all_input_nodes):
                blocked.add(node)
                continue
            spent += _matmul_seconds(node)
            waiting.remove(node)
            yield node

    for node in nodes:
        if node in loose:
            waiting.append(node)
            continue
        for started in [each for each in node.all_input_nodes if each in on_way]:
            collectives[started] += beside(on_way[started])
            yield from collectives[started]
            del on_way[started]
        if node.op == "output" or _is_mutating(node):  # it may change what a product reads
            on_way.clear()
            yield from beside(math.inf)
        yield node
        if node in collectives:
            on_way[node] = _exposed_seconds(node, find_readers(node))


def _find_deferrable(nodes: list[fx.Node]) -> set[fx.Node]:
    """
    Return the products that only the output needs, with the nodes that depend on them or that only
    they need.
    """
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output":
            continue  # it needs all nodes
        if (
            node.op != "call_function"
            or node.target in custom_ops.START_OPS
            or _is_mutating(node)
            or needed & set(node.users)
        ):
            needed.add(node)
    loose: set[fx.Node] = set()
    for node in nodes:
        if (
            node not in needed
            and node.op != "output"
            and (_is_matmul(node) or loose & set(node.all_input_nodes))
        ):
            loose.add(node)
    for node in reversed(nodes):
        if node not in needed and node.op != "output" and node.users and set(node.users) <= loose:
            loose.add(node)
    return loose


def _is_mutating(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _is_matmul(node: fx.Node) -> bool:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in MATMUL_NAMES


def _matmul_seconds(node: fx.Node) -> float:
    if not _is_matmul(node):
        return 0.0
    value = value_of(node.args[-2])
    out = value_of(node)
    if value is None or out is None:
        return 0.0
    return 2 * count_elements(out) * size_hint(value.shape[-1]) / FLOPS_PER_SECOND


def _exposed_seconds(node: fx.Node, products: list[fx.Node]) -> float:
    """
    Return the seconds of a collective that other nodes must hide.

    Args:
        products: those that start before it has arrived, with this rank's part.
    """
    size = axis_size_of(cast(int, node.args[1]))
    if (
        node.target is custom_ops.MATMUL_REDUCE_SCATTER_OP
    ):  # its last product, for this rank, hides some of it
        out = value_of(node)
        widths = [value_of(each) for each in cast(list[fx.Node], node.args[0])]
        if out is None:
            return 0.0
        own = sum(
            2 * count_elements(out) * size_hint(each.shape[-1])
            for each in widths
            if each is not None
        )
        return (size - 1) * count_bytes(out) / BYTES_PER_SECOND - own / FLOPS_PER_SECOND
    values = [value_of(each) for each in (node, node.args[0])]
    most = max((count_bytes(one) for one in values if one is not None), default=0.0)
    return most / BYTES_PER_SECOND - sum(map(_matmul_seconds, products)) / size


def _split_collective(
    graph: fx.Graph, node: fx.Node, beside: list[fx.Node], products: list[fx.Node]
) -> None:
    """
    Replace a collective by its start, and wait before its first use, after the nodes that run
    beside it.

    Args:
        products: those that start before its result has arrived.
    """
    position = {each: place for place, each in enumerate(graph.nodes)}
    first = min(node.users, key=position.__getitem__, default=None)
    if first is None:
        return
    with graph.inserting_before(node):
        started = graph.call_function(custom_ops.START_OPS[node.target], node.args, node.kwargs)
        started.meta.update(node.meta)
    for product in products:
        for each in reversed(weight_chain(product.args[-1])):
            if position[each] > position[first]:
                first.prepend(each)
    made = fuse_gather(graph, started, products, first) if products else []
    # What is sent must not change until then. The compiler reorders the code by dependencies:
    # without these, kernels that need the wait could move before the products.
    after = [*_nodes_sent(node), *made, *(each for each in beside if value_of(each) is not None)]
    with graph.inserting_before(first):
        graph.call_function(custom_ops.WAIT_OP, (started, after, node.args[1]))
    node.replace_all_uses_with(started)
    graph.erase_node(node)


def _nodes_sent(node: fx.Node) -> list[Any]:
    """Return what a collective reads."""
    if node.target is custom_ops.MATMUL_REDUCE_SCATTER_OP:
        return [*cast(list[fx.Node], node.args[0]), *cast(list[fx.Node], node.args[2])]
    return [node.args[0]]
