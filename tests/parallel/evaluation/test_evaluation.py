"""Evaluation over a source of batches: each row once and in order, as plain torch does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pdrun
from pdrun import col, row, vocab
from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import make_mesh
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

ROWS, BATCH = 27, 8
"""Batches of 8, 8, 8 and 3 rows: the last one leaves slices without rows."""
SPLIT = {"emb|head": vocab("tp"), "blocks.*.up": col("tp"), "blocks.*.down": row("tp")}
MESHES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"mesh": {"dp": 2, "tp": 2}, "strategy": SPLIT},
    "pipeline": {"mesh": {"pp": 2, "dp": 2}, "pipeline": 2},
    "context": {"mesh": {"dp": 1, "cp": 2}, "context": True},
    "stages and tensor": {"mesh": {"pp": 2, "tp": 2, "dp": 1}, "pipeline": 2, "strategy": SPLIT},
}


def right(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    kept = batch[1] != -100
    return ((output.argmax(-1) == batch[1]) & kept).sum(), kept.sum()


def histogram(output: Tensor, batch: Any) -> Tensor:
    return torch.bincount(output.argmax(-1).flatten(), minlength=zoo.WORDS)


METRICS = {"right": right, "histogram": histogram}


def dataset() -> TensorDataset:
    return TensorDataset(*zoo.batch_of(ROWS, 5))


def make(kind: str, level: int, accumulate: int = 1) -> pdrun.Run:
    """Return a run whose model is in training, but for one module."""
    options = dict(MESHES[kind])
    if "mesh" in options:
        options["mesh"] = make_mesh(**options["mesh"])
    if "strategy" in options:
        options["strategy"] = pdrun.Strategy(options["strategy"])
    if "pipeline" in options:
        options["pipeline"] = pdrun.Pipeline(microbatches=options["pipeline"])
    else:
        options["accumulate"] = accumulate
    if "context" in options:
        options["context"] = pdrun.ContextParallel()
    return pdrun.parallelize(
        zoo.build(p=0.0 if kind == "context" else 0.4),
        zoo.OPTIMIZERS["AdamW"],
        zoo.token_loss,
        optimizer_level=level,
        **options,
    )


def evaluate(kind: str, level: int, accumulate: int, loader_kind: str) -> Any:
    run = make(kind, level, accumulate)
    run.model.blocks[0].drop.eval()
    run.step(zoo.batch_of(8, 0))
    modes = [module.training for module in run.model.modules()]
    if loader_kind == "list":
        columns = dataset().tensors
        source: Any = [tuple(x[at : at + BATCH] for x in columns) for at in range(0, ROWS, BATCH)]
    else:
        kinds = {"Loader": pdrun.Loader, "DataLoader": DataLoader}
        source = kinds[loader_kind](dataset(), BATCH)
    result = run.evaluate(source, metrics=METRICS, outputs=lambda out, batch: (out, batch[0]))
    assert [module.training for module in run.model.modules()] == modes
    assert result.outputs[0].requires_grad is False
    assert all(weight.grad is None for weight in run.model.parameters())
    weights = {name: weight.clone() for name, weight in run.full_weights().items()}
    run.step(zoo.batch_of(8, 1))  # training goes on
    return (
        weights,
        result.loss,
        result.count,
        result.rows,
        result["right"],
        result["histogram"].tolist(),
        [x.tolist() for x in result.outputs],
    )


def check(told: list[Any]) -> None:
    """Compare with plain torch on the same weights, all rows at a time."""
    model = zoo.build()
    model.load_state_dict(told[0][0], strict=False)
    inputs, targets = dataset().tensors
    with torch.no_grad():
        output = model.eval()(inputs)
    total, count = zoo.token_loss(output, (inputs, targets))
    hits, of = right(output, (inputs, targets))
    for _, loss, counted, rows, share, counts, (outputs, read) in told:
        assert (counted, rows) == (int(count), ROWS)
        assert loss == pytest.approx(float(total / count), rel=1e-5)
        assert share == pytest.approx(float(hits / of))
        assert counts == histogram(output, None).tolist()
        assert read == inputs.tolist()
        torch.testing.assert_close(torch.tensor(outputs), output, rtol=1e-4, atol=1e-5)
    assert all(each[1:] == told[0][1:] for each in told), "the same on every rank"


@pytest.mark.parametrize(
    ("world", "kind", "level", "accumulate", "source"),
    [
        (2, "data", 0, 3, "Loader"),
        (3, "data", 3, 2, "DataLoader"),
        (2, "data", 1, 1, "list"),
        (4, "tensor", 2, 2, "Loader"),
        (4, "pipeline", 3, 1, "list"),
        (2, "context", 0, 2, "Loader"),
        (4, "stages and tensor", 1, 1, "DataLoader"),
    ],
)
def test_sums_and_outputs_are_those_of_one_process(
    world: int, kind: str, level: int, accumulate: int, source: str, worlds: Worlds
) -> None:
    check(worlds(world).run(evaluate, kind, level, accumulate, source))


class Tagger(nn.Module):
    """Has outputs of every kind of structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"found": [{"box": row} for row in self.linear(x)], "texts": ["a"] * len(x)}


def total(output: Any, batch: Any) -> tuple[Tensor, int]:
    return sum((each["box"].sum() for each in output["found"]), torch.zeros(())), len(batch[0])


def tagged() -> Any:
    run = pdrun.parallelize(Tagger(), lambda params: torch.optim.SGD(params, 0.1), total)
    batches = [(torch.full((rows, 2), float(rows)),) for rows in (3, 1, 4)]
    found = run.evaluate(batches, outputs=True).outputs
    ragged = run.evaluate(
        batches, outputs=lambda out, batch: batch[0][:, :1].expand(-1, len(batch[0]))
    )
    return len(found["found"]), sorted(found["found"][0]), found["texts"], ragged.outputs


def test_outputs_of_any_structure_and_of_rows_of_other_lengths(worlds: Worlds) -> None:
    for count, keys, texts, ragged in worlds(2).run(tagged):
        assert (count, keys, texts) == (8, ["box"], ["a"] * 8)
        assert [float(each[0]) for each in ragged] == [3, 3, 3, 1, 4, 4, 4, 4]


def own_rows(strategy: str) -> Any:
    """Evaluate batches that are this rank's own rows, or that every rank computes."""
    rank = torch.distributed.get_rank()
    run = pdrun.parallelize(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: (out.sum(), len(out)),
        dataset_strategy=strategy,
        accumulate=2,
    )
    own = rank if strategy == "data_parallel" else 0
    batches = [torch.arange(4).view(2, 2) + 10.0 * own + 100 * step for step in range(2)]
    found = run.evaluate(batches, metrics={"rows": lambda out, batch: len(batch)}, outputs=first)
    return found.rows, found["rows"], [float(x) for x in found.outputs]


def first(output: Tensor, batch: Tensor) -> Tensor:
    return batch[:, 0]


def test_own_rows_and_full_batches_count_each_row_once(worlds: Worlds) -> None:
    assert set(map(str, worlds(2).run(own_rows, "data_parallel"))) == {
        "(8, 8, [0.0, 2.0, 10.0, 12.0, 100.0, 102.0, 110.0, 112.0])"
    }
    assert set(map(str, worlds(2).run(own_rows, "full_batch"))) == {
        "(4, 4, [0.0, 2.0, 100.0, 102.0])"
    }


def simple() -> pdrun.Run:
    return pdrun.parallelize(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: (out.sum(), len(out)),
    )


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ([], {}, "no batch"),
        ((torch.ones(4, 2), torch.ones(4)), {}, "iterable of batches, got a tuple"),
        ([torch.ones(4, 2), torch.ones(4)], {}, "one batch"),
        (3, {}, "got a int"),
        (None, {"metrics": [len]}, "metrics must be a dict"),
        (None, {"metrics": {"x": 3}}, "the metric x must be a function"),
        (None, {"metrics": {"x": lambda out, batch: "y"}}, "the metric x returned str"),
        (None, {"metrics": {"x": lambda out, batch: (1, 2, 3)}}, "returned int, int, int"),
        (None, {"outputs": "all"}, "outputs must be True"),
        (None, {"outputs": lambda out, batch: out.sum()}, r"got a tensor of shape \(\) for 4 rows"),
        (None, {"outputs": lambda out, batch: [out]}, "got a list of 1 for 4 rows"),
    ],
)
def test_what_is_no_evaluation_is_refused(source: Any, options: Any, text: str) -> None:
    source = [torch.ones(4, 2)] if source is None else source
    with pytest.raises(UsageError, match=text):
        simple().evaluate(source, **{"metrics": {}} | options)


def test_a_metric_s_error_leaves_the_model_in_training() -> None:
    run = simple()
    with pytest.raises(ZeroDivisionError):
        run.evaluate([torch.ones(4, 2)], metrics={"x": lambda out, batch: 1 / 0})
    assert run.model.training
    assert run.evaluate([torch.ones(4, 2)], metrics={}, loss=False).loss is None


class OwnLoss(nn.Module):
    """Returns the mean of its loss over the labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="stand-in")
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = self.head(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def test_a_model_s_own_mean_is_weighted_by_its_labels() -> None:
    """Rows have 1 to 6 labels; without a graph the number of labels would be unknown."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(6, 6, 4), torch.randint(3, (6, 6))
    for index in range(6):
        labels[index, index + 1 :] = -100
    model = OwnLoss()
    want = float(model(inputs, labels).loss.detach())
    run = pdrun.parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda out, batch: out.loss,
        accumulate=3,
    )
    batches = [{"inputs": inputs[:4], "labels": labels[:4]}]
    batches += [{"inputs": inputs[4:], "labels": labels[4:]}]
    seen = []
    found = run.evaluate(batches, metrics={"n": lambda out, batch: seen.append(out.logits) or 1})
    assert found.loss == pytest.approx(want) and found.count == 21
    assert found["n"] == 5, "slices with rows"
    assert all(weight.grad is None for weight in model.parameters())
