"""
Buffers that a forward changes: ranks stay equal, and what differs from one process is said once.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch


class Tracker(nn.Module):
    """
    Tracks the mean of its input in a buffer.

    Args:
        kind: how the buffer is changed: "written", "assigned", "counted", "kept" or "constant".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.register_buffer("mean", None if kind == "kept" else torch.zeros(4))
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if self.kind == "written":
            self.mean.lerp_(now, 0.5)
        elif self.kind == "assigned":
            self.mean = self.mean * 0.5 + now * 0.5
        elif self.kind == "counted":
            self.mean += 1
        elif self.kind == "kept":
            self.mean = x.detach()
        return self.linear(x if self.kind == "kept" else x - self.mean)


def make_network(kind: str) -> nn.Module:
    if kind == "spectral":
        torch.manual_seed(0)
        return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))
    return nn.Sequential(Tracker(kind))


def train(kind: str, **options: Any) -> tuple[str, list[float], dict[str, Tensor]]:
    """Return what was printed in three uneven steps, the losses, and the buffers."""
    run = parallelize(
        make_network(kind),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, x: (output.square().sum(), len(x)),
        **options,
    )
    log = io.StringIO()
    with contextlib.redirect_stderr(log):
        found = [run.step(torch.arange(4.0 * rows).view(rows, 4) / rows).loss for rows in (8, 7, 5)]
    return log.getvalue(), found, dict(run.model.named_buffers())


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("kind", ["written", "assigned"])
def test_statistics_of_rows_are_said_and_stay_equal(worlds: Worlds, kind: str, level: int) -> None:
    """The buffer is named once; after each step all ranks have rank 0's value."""
    first, other = worlds(2).run(train, kind, optimizer_level=level)
    assert first[0].count("buffer 0.mean: changed by each forward with the rows of a slice") == 1
    assert first[0].count("pdrun:") == 1
    assert not other[0]
    assert torch.equal(first[2]["0.mean"], other[2]["0.mean"])
    assert first[2]["0.mean"].abs().sum() > 0


@pytest.mark.parametrize("kind", ["spectral", "counted", "constant"])
def test_what_equals_one_process_is_not_said(worlds: Worlds, kind: str) -> None:
    """Each rank computes what one process would: nothing is printed, and the losses agree."""
    found = worlds(2).run(train, kind)
    alone = train(kind)
    assert [text for text, _, _ in found] == ["", ""]
    assert alone[0] == ""
    assert found[0][1] == pytest.approx(alone[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["spectral", "counted", "constant"])
def test_a_change_in_each_micro_batch_is_said(kind: str) -> None:
    """One process with micro-batches changes a buffer more often than without."""
    text = train(kind, accumulate=2)[0]
    said = "changed by each of the 2 forwards of a step; one process changes it once" in text
    assert said == (kind != "constant")


def test_a_change_in_a_recomputed_forward_is_said() -> None:
    """A forward that is computed again changes a buffer again."""
    assert "0.mean: changed by each of the" in train("counted", recompute=["0"])[0]


def test_a_buffer_with_rows_is_each_ranks_own(worlds: Worlds) -> None:
    """Its shape follows the rows of a slice, so that ranks cannot exchange it."""
    found = worlds(2).run(train, "kept")
    assert "buffer 0.mean: given another shape by a forward" in found[0][0]
    assert [len(buffers["0.mean"]) for _, _, buffers in found] == [2, 3]


def test_a_changed_shape_of_an_equal_buffer_is_refused() -> None:
    """What every rank exchanges after each step must stay as it is."""
    run = parallelize(
        make_network("written"),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, x: (output.square().sum(), len(x)),
    )
    run.step(torch.ones(4, 4))
    tracker = run.model[0]
    tracker.kind = "kept"
    with pytest.raises(UsageError, match=r"the buffer 0\.mean is shape .* after this step"):
        run.step(torch.ones(4, 4))


# ---- states in plain attributes -----------------------------------------------


class Recurrent(nn.Module):
    """Carries its state from one forward to the next, detached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(4, 5)
        self.out = nn.Linear(5, 1)
        self.state: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = None if self.state is None else (self.state[0].detach(), self.state[1].detach())
        self.state = self.cell(x, kept)
        return self.out(self.state[0])


class Wrapped(nn.Module):
    """Has it as a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Recurrent()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Running(nn.Module):
    """Keeps a mean of its rows, and a scale that no forward changes."""

    def __init__(self, is_read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.is_read = is_read
        self.mean = torch.zeros(4)
        self.scale = torch.linspace(0.5, 1.0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_read:
            self.mean = x.detach().mean(0)
            return self.layer(x * self.scale)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x * self.scale - self.mean)


def train_states(model: nn.Module, accumulate: int, **options: Any) -> tuple[list[float], str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = parallelize(
            model,
            lambda params: torch.optim.SGD(params, 0.1),
            lambda output, batch: (output.square().sum(), len(output)),
            accumulate=accumulate,
            **options,
        )
        dice = torch.Generator().manual_seed(1)
        losses = [run.step(torch.randn(8, 4, generator=dice)).loss for _ in range(3)]
    return losses, said.getvalue()


def train_recurrent(accumulate: int) -> tuple[list[float], str]:
    return train_states(Recurrent(), accumulate)


def test_a_state_that_other_rows_would_get_is_refused(worlds: Worlds) -> None:
    """Micro-batches had read each other's state, silently."""
    with pytest.raises(UsageError, match="state is a state of the rows of one forward"):
        train_recurrent(2)
    (one, _), (two, _) = worlds(2).run(train_recurrent, 1)
    assert one == two == pytest.approx(train_recurrent(1)[0], rel=1e-5)


def test_a_state_of_a_recomputed_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"inner\.state is a state that the forward changes"):
        train_states(Wrapped(), 1, recompute=["inner"])


def test_a_mean_that_is_read_by_the_next_forward_is_said() -> None:
    assert "attribute mean: kept by each forward" in train_states(Running(True), 2)[1]
    assert train_states(Running(False), 2)[1] == ""
    assert train_states(Running(True), 1)[1] == ""


class Scaled(nn.Module):
    """Has a constant in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = torch.linspace(0.5, 1.0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale)


def test_a_compiled_model_without_states_stays_one_graph() -> None:
    """The search for states had cut it: the second forward ran eagerly, with more memory."""
    from torch._dynamo.utils import counters

    counters.clear()
    train_states(nn.Sequential(Scaled()), 1, compile={"modules": ["0"], "backend": "eager"})
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
