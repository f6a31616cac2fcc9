"""
The operator engine: a cut model has the numbers of one process, on real ranks; and what it says at
plan time.
"""

from __future__ import annotations

import functools
import logging
import re
from math import prod
from typing import Any

import pytest
import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.layouts.device_matrix import Layout
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.explain import explain_plan
from pdrun.parallel.operators.graph.constraints import decode_layout, encode_layout
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.strategy import OpLayout
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.tensor.styles import replicate
from tests.lib import operator_models as nets
from tests.lib import tiers
from tests.lib.shared_exports import forget_exports

pytestmark = pytest.mark.torch

MEGATRON = {
    "blocks.*.up.weight": L("tp", None),
    "blocks.*.down.weight": L(None, "tp"),
    "blocks.*.proj.weight": L(None, "tp"),
}
LLAMA = {
    "[qkv].weight": L("tp", None),
    "o.weight": L(None, "tp"),
    "gate.weight": L("tp", None),
    "up.weight": L("tp", None),
    "down.weight": L(None, "tp"),
    "emb.weight": L("tp", None),
}
SEQUENCE = {
    "norm[12].rms_norm": OpLayout(in_=(L(None, "tp", None),)),
    "add_2": OpLayout(in_=(L(None, "tp", None),)),
    "add_3": OpLayout(in_=(L(None, "tp", None),)),
}
TABLES = {
    "users.weight": L("tp", None),
    "items.weight": L(None, "tp"),
    "tags.weight": L(None, "tp"),
    "fc1.weight": L("tp", None),
    "fc2.weight": L(None, "tp"),
}
CONV = {"one.weight": L("tp", None, None, None), "two.weight": L(None, "tp", None, None)}
GRID = {
    "[qkv].weight": L("x", "y"),
    "o.weight": L("y", "x"),
    "gate.weight": L(("x", "y"), None),
    "up.weight": L(("y", "x"), None),
    "emb.weight": L("y", "x"),
}
MATRIX = Layout((2, 2), ("a", "b"))
TUTORIAL: dict[str, Any] = {
    "rows": {"matmul": ((4, 1), (1, 1))},
    "columns": {"matmul": ((1, 1), (1, 4)), "matmul_1": ((1, 4), (4, 1))},
    "both": {
        "matmul": ((2, 1), (1, 2)),
        "matmul_1": ((2, 2), (2, 1)),
        "matmul_2": ((2, 2), (2, 1)),
    },
    "mixed": {
        "matmul": ((2, 2), (2, 1)),
        "matmul_1": ((4, 1), (1, 1)),
        "matmul_2": ((1, 4), (4, 1)),
    },
    "layouts": {
        "matmul": (L("x", "y"), L("y", None)),
        "matmul_1": (L(("y", "x"), None), L(None, None)),
        "matmul_2": (L(None, ("x", "y")), L(("x", "y"), None)),
    },
    "matrix": {
        "matmul": (MATRIX("a", "b"), MATRIX("b", "None")),
        "matmul_1": (MATRIX(("b", "a"), "None"), None),
        "matmul_2": (MATRIX("None", ("a", "b")), MATRIX(("a", "b"), "None")),
    },
}

PAIRS: list[tuple[str, dict[str, int], Any]] = [
    ("perceptron", {"tp": 2}, {}),
    ("perceptron", {"tp": 2}, {"fc1": ((2, 1), (1, 1))}),
    ("perceptron", {"tp": 2}, {"fc1": ((1, 1), (2, 1))}),
    ("perceptron", {"tp": 2}, {"fc1": ((1, 2), (1, 2))}),
    ("perceptron", {"tp": 2}, {"fc1.weight": L("tp", None), "fc2": OpLayout(out=L("tp", None))}),
    ("perceptron", {"tp": 2}, {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}),
    ("uneven", {"tp": 2}, {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}),
    ("tiny", {"tp": 2}, MEGATRON),
    ("dropped", {"tp": 2}, MEGATRON),
    ("llama", {"tp": 2}, LLAMA),
    ("llama", {"tp": 2}, LLAMA | SEQUENCE),
    ("conv", {"tp": 2}, CONV),
    (
        "conv",
        {"tp": 2},
        {"two.weight": L("tp", None, None, None), "groups.weight": L("tp", None, None, None)},
    ),
    ("recommender", {"tp": 2}, TABLES),
    (
        "tiny",
        {"tp": 3},
        {"blocks.*.proj.weight": L(None, "tp"), "blocks.*.up.weight": L("tp", None)},
    ),
]
FOURS: list[tuple[str, dict[str, int], Any]] = [
    ("llama", {"x": 2, "y": 2}, GRID),
    ("llama", {"tp": 4}, LLAMA),  # two groups of heads: they are gathered
    ("uneven", {"tp": 4}, {"fc1.weight": L("tp", None), "fc2.weight": L(None, "tp")}),
    ("uneven", {"x": 2, "y": 2}, {"fc1.weight": L(("x", "y"), None), "fc2.weight": L("y", "x")}),
    ("tiny", {"dp": 2, "tp": 2}, MEGATRON),
]
SIBLINGS = (PAIRS[9], FOURS[2])
"""Of which the default run has a close relative: single precision, and two ranks."""


@pytest.mark.parametrize(
    ("name", "axes", "entries"),
    [tiers.thorough(*case) if case in SIBLINGS else case for case in (*PAIRS, *FOURS)],
    ids=str,
)
def test_a_cut_model_has_the_numbers_of_one_process(
    worlds: Any, name: str, axes: dict[str, int], entries: Any
) -> None:
    worlds(prod(axes.values())).run(nets.compare, name, axes, entries)


@pytest.mark.parametrize("kind", TUTORIAL)
def test_the_tutorial_network_has_one_sequence_of_losses(worlds: Any, kind: str) -> None:
    """Counts, layouts and one process; MindSpore's operator-level tutorial shows the same."""
    alone = nets.sequence("tutorial", {}, {})
    assert alone[-1] < 0.9 * alone[0]
    for losses in worlds(4).run(nets.sequence, "tutorial", {"x": 2, "y": 2}, TUTORIAL[kind]):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_on_eight_ranks(worlds: Any) -> None:
    worlds(8).run(nets.compare, "feed", {"x": 2, "y": 4}, {"matmul": ((2, 1), (1, 4))})


@pytest.mark.parametrize(
    ("name", "axes", "entries"),
    [PAIRS[9], *(tiers.thorough(*case) for case in (PAIRS[11], PAIRS[13], FOURS[0]))],
    ids=str,
)
def test_in_single_precision(worlds: Any, name: str, axes: dict[str, int], entries: Any) -> None:
    worlds(prod(axes.values())).run(nets.compare, name, axes, entries, dtype=torch.float32)


def test_other_shapes_have_the_same_layouts(worlds: Any) -> None:
    """Fault 35: a last batch of 3 rows, one of a single row, and the first shape again."""
    worlds(2).run(
        nets.compare, "perceptron", {"tp": 2}, {"fc1": ((2, 1), (1, 1))}, rows=(4, 3, 1, 4)
    )


def test_other_shapes_of_a_decoder(worlds: Any) -> None:
    worlds(2).run(nets.compare, "tiny", {"tp": 2}, MEGATRON, rows=(4, 3))


def test_layouts_inside_a_model(worlds: Any) -> None:
    """
    `shard` on modules and functions and `constrain` in a forward, without a word in the strategy.
    """
    plan = planned("marked", {}, dp=1, tp=2)
    assert counts_of(plan, "square") == ((2, 1),)
    assert {
        plan.graph.tensors[index].name: layout
        for index, layout in plan.weights.items()
        if layout.axes
    } == {"fc1.weight": L("tp", None), "fc1.bias": L("tp")}
    worlds(2).run(nets.compare, "marked", {"dp": 1, "tp": 2}, {})


def test_submodules_with_hooks_are_called(worlds: Any) -> None:
    """
    Level 3 and recomputation work on the forward of submodules, which take their part of the graph.
    """
    assert (
        worlds(2).run(nets.hooked, {"tp": 2}, MEGATRON)
        == [["blocks.0", "blocks.1", "blocks.2", "norm"]] * 2
    )


def test_a_copy_runs_by_itself(worlds: Any) -> None:
    worlds(2).run(nets.copied, {"tp": 2}, MEGATRON)


def test_an_axis_of_one_device_goes_through_the_same_code(worlds: Any) -> None:
    """Fault 33."""
    assert worlds(1).run(nets.compare, "llama", {"tp": 1}, LLAMA)[0]["counts"] == {}


def test_repeated_computation_changes_nothing(worlds: Any) -> None:
    """The same strategy, with an axis that nothing is cut over."""
    entries = {"fc1": ((1, 1), (2, 1))}
    worlds(4).run(nets.compare, "perceptron", {"tp": 2, "idle": 2}, entries)
    worlds(4).run(nets.compare, "perceptron", {"idle": 2, "tp": 2}, entries)


# ---- how much is communicated -----------------------------------------------


def test_a_megatron_block_communicates_four_times(worlds: Any) -> None:
    """
    An all-reduce behind each row-cut product, forward, and one before each column-cut one,
    backward.
    """
    entries = {key: layout for key, layout in LLAMA.items() if key != "emb.weight"}
    counts = worlds(2).run(nets.compare, "llama", {"tp": 2}, entries)[0]["counts"]
    activations = 4 * 6 * 16 * 8
    assert counts == {
        "('all_reduce', ('tp',))": (4, 4 * activations),
        "forward ('all_reduce', ('tp',))": (2, 2 * activations),
    }


def test_sequence_parallel_gathers_and_scatters_four_times_each(worlds: Any) -> None:
    """
    An all-gather before each column-cut product and a reduce-scatter behind each row-cut one, and
    the other way round backward. Embedding and head follow: each rank has its part of the sequence,
    and the logits are gathered at the end.
    """
    entries = {key: layout for key, layout in (LLAMA | SEQUENCE).items() if key != "emb.weight"}
    counts = worlds(2).run(nets.compare, "llama", {"tp": 2}, entries)[0]["counts"]
    part = 4 * 3 * 16 * 8
    assert {key.split("'")[1] for key in counts} == {"all_gather", "reduce_scatter"}
    logits = 4 * 3 * 21 * 8
    assert counts["('all_gather', ('tp',))"] == (4 + 1, 4 * part + logits)
    assert counts["('reduce_scatter', ('tp',))"] == (4, 4 * 2 * part)
    assert counts["forward ('all_gather', ('tp',))"] == (2 + 1, 2 * part + logits)
    assert counts["forward ('reduce_scatter', ('tp',))"] == (2, 2 * 2 * part)


# ---- plans: no ranks needed -------------------------------------------------


def planned(name: str, entries: Any, rows: int = 4, **axes: int) -> OperatorPlan:
    """Return the plan for one of the models."""
    grid = Grid(tuple(axes), tuple(axes.values()))
    return Operators(entries).plan(nets.net(name), grid, nets.inputs(name, rows))


def counts_of(plan: OperatorPlan, name: str) -> tuple[tuple[int, ...], ...]:
    """
    Return how often each input of an operator is cut, dim by dim: MindSpore's form of a strategy.
    """
    place = next(at for at, operator in enumerate(plan.graph.operators) if operator.name == name)
    operator, choice = plan.graph.operators[place], plan.shardings[place]
    layouts = [
        choice.input_layout(at, len(plan.graph.shape_of(index)))
        for at, index in enumerate(operator.inputs)
    ]
    return tuple(tuple(plan.grid.group_size(axes) for axes in layout.dims) for layout in layouts)


def test_propagation_golden() -> None:
    """The feed-forward network of MindSpore's documentation of sharding propagation."""
    plan = planned("feed", {"matmul": ((2, 1), (1, 4))}, x=2, y=4)
    assert counts_of(plan, "add") == ((2, 4), (4,))
    assert counts_of(plan, "relu") == ((2, 4),)
    assert counts_of(plan, "matmul_1") == ((2, 4), (4, 1))
    assert plan.shardings[-1].output_layout(0, 2) == L("x", None).partial("y")


def test_propagation_never_changes_what_is_configured() -> None:
    plan = planned("feed", {"matmul": ((2, 1), (1, 4)), "relu": ((1, 1),)}, x=2, y=4)
    assert counts_of(plan, "relu") == ((1, 1),)
    assert counts_of(plan, "matmul") == ((2, 1), (1, 4))


def test_plans_are_the_same_every_time() -> None:
    one = planned("llama", LLAMA, tp=2)
    forget_exports()
    other = planned("llama", LLAMA, tp=2)
    assert (one.shardings, one.weights, one.grad_sums) == (
        other.shardings,
        other.weights,
        other.grad_sums,
    )


def test_nothing_configured_means_nothing_cut() -> None:
    plan = planned("tiny", {}, dp=2, tp=2)
    assert not any(choice.splits for choice in plan.shardings)
    assert not any(layout.axes for layout in plan.weights.values())


def test_heads_that_do_not_divide_are_gathered() -> None:
    """
    Fault 24: 4 heads over 3 ranks; the products are cut unevenly, the heads stay whole, and it is
    no error.
    """
    plan = planned("tiny", {"blocks.*.proj.weight": L(None, "tp")}, tp=3)
    attention = next(
        at for at, operator in enumerate(plan.graph.operators) if "attention" in operator.kind
    )
    assert plan.shardings[attention].input_state("tp", 0) != 1
    assert plan.weights[plan.graph.operators[attention + 3].inputs[1]] == L(None, "tp")


@pytest.mark.parametrize(
    ("name", "entries", "axes", "told"),
    [
        (
            "perceptron",
            {"fc3.weight": L("tp", None)},
            {"tp": 2},
            "'fc3.weight' matches no module.*mean 'fc[12].weight'",
        ),
        ("perceptron", {"fc1": L("tp", None)}, {"tp": 2}, "fc1 is an operator"),
        ("perceptron", {"fc1.weight": ((2, 1),)}, {"tp": 2}, "fc1.weight is a weight"),
        (
            "perceptron",
            {"fc1": ((2, 1), (1, 2))},
            {"tp": 2},
            r"linear cannot be split into \(\(2, 1\), \(1, 2\)\)",
        ),
        (
            "perceptron",
            {"fc1": ((4, 1), (1, 1))},
            {"tp": 2},
            "linear cannot be split.*one axis per count",
        ),
        ("perceptron", {"fc1": ((2,), (1, 1))}, {"tp": 2}, "one count per dim"),
        (
            "perceptron",
            {"fc1": (2, 1)},
            {"tp": 2},
            r"is an operator: .* not describe its inputs; .* such as \(\(2, 4\),\)",
        ),
        (
            "perceptron",
            {"fc1": (L("tp", None), L("tp", None))},
            {"tp": 2},
            "linear at .*cannot take.*along tp",
        ),
        ("perceptron", {"fc1": (L("zp", None),)}, {"tp": 2}, "there is no axis 'zp'"),
        ("perceptron", {"fc1": (L(None, "dp"),)}, {"dp": 2, "tp": 2}, "shards dim 1 over dp"),
        ("perceptron", {"fc1.weight": L("dp", None)}, {"dp": 2, "tp": 2}, "shards dim 0 over dp"),
        (
            "perceptron",
            {"fc1": ((2, 1), (1, 1)), "fc1.linear": ((2, 1), (1, 1))},
            {"tp": 2},
            "by fc1 and by fc1.linear",
        ),
        (
            "llama",
            {"head": ((1, 1, 2), (1, 2)), "emb": ((2, 1), (1, 1))},
            {"tp": 2},
            "emb.weight has two layouts: .* head, .* for emb",
        ),
        (
            "tiny",
            {"blocks.0.view": ((1, 1, 2),)},
            {"tp": 2},
            "the number of shards of view must divide 3, got 2",
        ),
        ("tiny", {"norm.weight": L("tp")}, {"tp": 2}, "layer_norm at .*cannot take"),
    ],
    ids=str,
)
def test_planning_refuses_wrong_entries(
    name: str, entries: Any, axes: dict[str, int], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        planned(name, entries, **axes)


def test_the_batch_may_be_named() -> None:
    """``dp`` on dim 0 says what holds anyway."""
    plan = planned("perceptron", {"fc1": (L("dp", None), L("tp", None))}, dp=2, tp=2)
    assert plan.weights[0] == L("tp", None)
    same = planned("perceptron", {"fc1": ((2, 1), (4, 1))}, dp=2, tp=4)
    assert (same.weights[0], same.shardings[0].input_layout(0, 2)) == (L("tp", None), L(None, None))


def test_layouts_are_accepted_in_every_form() -> None:
    """
    By axes, on a device matrix of its own, and as counts: for weights, inputs, results and inside
    of a model.
    """
    for weight in (
        L("tp", None),
        Layout((2, 2), ("a", "b"))("b", "None"),
        Layout((2,), ("m",))("m", "None"),
        (2, 1),
    ):
        assert planned("perceptron", {"fc1.weight": weight}, dp=2, tp=2).weights[0] == L("tp", None)
    matrix = Layout((2, 2), ("data", "model"))
    inputs = (matrix("data", "None"), matrix("model", "None"))
    want = planned("perceptron", {"fc1": (L("dp", None), L("tp", None))}, dp=2, tp=2)
    assert planned("perceptron", {"fc1": inputs}, dp=2, tp=2).shardings == want.shardings
    rows = planned(
        "perceptron", {"fc1.weight": L("tp", None), "fc2": OpLayout(out=L("tp", None))}, tp=2
    )
    assert (
        planned("perceptron", {"fc1.weight": (2, 1), "fc2": OpLayout(out=(2, 1))}, tp=2).out_layouts
        == rows.out_layouts
        != {}
    )
    for said in (L("dp", None, "tp"), (2, 1, 4), matrix("data", ("model",))):
        assert decode_layout(encode_layout(said)) == said


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        ((3, 1), r"fc1\.weight: no axes make the counts \(3, 1\)"),
        ((0, 1), "0 in .* is not a count of at least 1"),
        (Layout((3,), ("m",))("m", "None"), r"fc1\.weight: \(m=3\) has 3 devices"),
        (Layout((2, 2), ("a", "b"))("a", "None"), "L\\('dp', None\\) shards dim 0 over dp"),
    ],
)
def test_forms_that_the_mesh_lacks_are_refused(weight: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        planned("perceptron", {"fc1.weight": weight}, dp=2, tp=2)


class Strange(torch.nn.Module):
    """A model with an operator that nobody has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.linalg.matrix_exp(self.fc(x))


def test_an_operator_without_a_rule_is_computed_in_full_and_listed_with_its_line() -> None:
    """Fault 34."""
    grid, sample = Grid(("tp",), (2,)), (torch.zeros(4, 4),)
    entries = {"fc": ((2, 1), (1, 1))}
    plan = Operators(entries).plan(Strange(), grid, sample)
    asked = Operators({**entries, "linalg_matrix_exp": replicate()}).plan(Strange(), grid, sample)
    assert plan.shardings[0].splits and not plan.shardings[1].splits
    assert plan.shardings == asked.shardings
    (note,) = plan.notes
    assert re.match("no rule for linalg_matrix_exp, so every rank computes it in full: lin", note)
    assert re.search(r"test_operators.py:\d+: return torch.linalg.matrix_exp", note)
    assert note in explain_plan(plan)
    with pytest.raises(UsageError, match=r"test_operators.py:\d+.*no rule for splitting linalg_m"):
        Operators({"linalg_matrix_exp": ((2, 1),)}).plan(Strange(), grid, sample)


class Branching(torch.nn.Module):
    """A model whose control flow depends on data."""

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


def test_a_model_that_does_not_export_is_refused(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=r"test_operators.py:\d+: Branching does not export"):
        Operators({}).plan(Branching(), Grid(("tp",), (2,)), (torch.zeros(4),))
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "torch has printed its graph"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class ByKey(torch.nn.Module):
    """Takes one key of a batch; the other is the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def trained_by_key() -> float:
    batch = {"x": torch.ones(2, 4), "y": torch.ones(2, 4)}
    run = parallelize(
        ByKey(),
        functools.partial(torch.optim.SGD, lr=0.1),
        lambda out, batch: ((out - batch["y"]).sum(), len(out)),
        mesh=mesh.make_mesh(tp=2),
        strategy=Operators({"fc.weight": L("tp", None)}),
        sample=batch,
    )
    run.verify([batch])
    return run.step(batch).loss


def test_a_model_that_takes_some_keys_of_a_batch_still_does_when_it_is_cut(worlds: Any) -> None:
    first, second = worlds(2).run(trained_by_key)
    assert first == second
