"""What crosses a stage boundary: forms of results, and which results skip stages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.metadata import (
    BoundaryRecord,
    SentTensor,
    build_value,
    flatten_result,
    form_of,
)
from pdrun.parallel.pipeline.skips import StageSkip, trace_forward
from pdrun.parallel.pipeline.split import split_model
from tests.lib.pipeline_cases import Ladder, RungOutput
from tests.lib.small_models import batch_of

pytestmark = pytest.mark.torch


class Pair(NamedTuple):
    """A named tuple."""

    first: torch.Tensor
    second: int


class Output(OrderedDict[str, Any]):
    """A dict of another class, as transformers' ModelOutput."""


def test_results_keep_their_classes() -> None:
    one = torch.ones(2)
    value = Output(a=RungOutput(one, {"up": one * 2}), b=[Pair(one * 3, 4), (None, "x")])
    form = form_of(value, "m")
    record = BoundaryRecord(
        "next",
        1,
        (SentTensor(-1, (2,), torch.float32, True),),
        3,
        (("m", form),),
        ((("m", 0, 1), 0),),
    )
    again = BoundaryRecord.decode(record.encode())
    assert again == record
    numbers = iter(range(9))
    built = build_value(again.returned[0][1], lambda shape, dtype: torch.full(shape, next(numbers)))
    assert type(built) is Output
    assert type(built["a"]) is RungOutput
    assert type(built["b"][0]) is Pair
    assert built["b"][0].second == 4
    assert built["b"][1] == (None, "x")
    leaves = [leaf for leaf in flatten_result(built) if isinstance(leaf, torch.Tensor)]
    assert [float(leaf[0]) for leaf in leaves] == [0.0, 1.0, 2.0]


def test_classes_that_other_ranks_cannot_find() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(UsageError, match="m returns a Local"):
        form_of(Local(1), "m")
    with pytest.raises(UsageError, match="which this rank has not imported"):
        build_value(["object", "a.module.of.no.one", "Output", [], []], lambda *_: None)
    with pytest.raises(UsageError, match="which this rank has not imported"):
        build_value(["object", "os", "system", [], []], lambda *_: None)


def test_results_that_later_stages_use_are_found() -> None:
    model = Ladder().to("meta")
    split = split_model(Ladder(), 4)
    assert list(split.unit_stages) == ["emb", "rungs.0", "rungs.1", "rungs.2", "rungs.3", "norm"]
    found = trace_forward(
        model, split, lambda model, batch: model(batch[0]), batch_of(2, 0), torch.device("cpu")
    )
    assert found.error == ""
    assert found.calls == tuple(split.unit_stages)
    # the embedding's result for the norm; what rung 0 leaves is used by rung 3 only through its
    # arguments, which are sent anyway
    assert found.skips == (StageSkip(("emb", 0, 0), 0, 3, frozenset({3})),), found.skips


def test_a_forward_that_cannot_be_traced_has_a_reason() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(h) if float(h.sum()) > 0 else h

    model = Asks()
    found = trace_forward(
        model,
        split_model(model, 2),
        lambda model, x: model(x),
        torch.ones(2, 4),
        torch.device("cpu"),
    )
    assert "DataDependentOutputException" in found.error
    assert found.skips == ()
