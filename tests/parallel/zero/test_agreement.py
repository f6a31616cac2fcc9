"""What all ranks must do alike, without ranks: orders of collectives, norms, random numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdrun.parallel.data.batch_slicing import slice_rows
from pdrun.parallel.rng.shard_region import flat_indices
from pdrun.parallel.zero import flat_layout
from pdrun.parallel.zero.bucket_order import BucketOrder
from pdrun.parallel.zero.gather_order import GatherSchedule
from pdrun.parallel.zero.grad_norm import clip_factor, square_sum
from pdrun.parallel.zero.precision import LossScale

pytestmark = pytest.mark.torch


class FakeBucket:
    """A bucket of one gradient that logs when its sum starts."""

    reduces_each = True

    def __init__(self, index: int, log: list[int]) -> None:
        self.weights = [SimpleNamespace(chunk=0, param=SimpleNamespace(grad=None))]
        self.comm = SimpleNamespace(shards=1)
        self.missing_grads = 1
        self._index, self._log = index, log

    def begin_microbatch(self, first: bool, times: int) -> None: ...

    def take_grads(self, first: bool) -> None: ...

    def start_sum(self) -> None:
        self._log.append(self._index)


def test_sums_start_in_one_order_whatever_arrives_first() -> None:
    log: list[int] = []
    buckets: Any = [FakeBucket(index, log) for index in range(3)]
    order = BucketOrder(buckets, [-1, -1, -1], None, may_wait=False)
    order.begin(True, True, None, 1)
    order.count_gradient(2)
    order.count_gradient(1)
    assert log == []
    order.count_gradient(0)
    assert log == [0, 1, 2]


def test_units_are_gathered_in_the_order_of_the_first_rank() -> None:
    class FirstRankRanBackwards:
        device = torch.device("cpu")

        def broadcast_first(self, indices: torch.Tensor, what: str) -> None:
            indices.copy_(torch.tensor([2, 1, 0]))

    comm: Any = FirstRankRanBackwards()
    schedule = GatherSchedule({0: [], 1: [], 2: []}, [], lambda unit: None)
    schedule.agree_on_order(comm)
    assert [schedule.position_of(unit) for unit in range(3)] == [2, 1, 0]


def test_the_imaginary_parts_count_in_a_norm() -> None:
    assert square_sum([torch.tensor([3 + 4j])], exact=True).item() == 25.0


def test_small_gradients_are_not_enlarged() -> None:
    assert clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert clip_factor(torch.tensor(2.0), 1.0).item() == pytest.approx(0.5)


def test_the_loss_scale_is_halved_for_a_bad_step_and_doubled_after_many_good_ones() -> None:
    scale = LossScale(8.0)
    scale.record_step(finite=False)
    assert scale.value == 4.0
    for _ in range(LossScale.GROWTH_STEPS - 1):
        scale.record_step(finite=True)
    assert scale.value == 4.0
    scale.record_step(finite=True)
    assert scale.value == 8.0


def test_the_elements_of_a_shard_have_their_numbers_in_the_full_tensor() -> None:
    found, whole = flat_indices((2, 2), {1: (((2, 4),), 4)}, torch.device("cpu"))
    assert (found.tolist(), whole) == ([2, 3, 6, 7], (2, 4))


def test_each_weight_begins_at_a_vector_of_the_flat_buffer() -> None:
    layout = flat_layout.make_flat_layout([("a", (1,)), ("b", (3,)), ("c", (2, 2))], 1, 1)
    align = flat_layout.ALIGN_ELEMENTS
    assert [slot.start for slot in layout.slots] == [0, align, 2 * align]


def test_each_micro_batch_has_neighbouring_rows_of_all_ranks() -> None:
    """The same rows are summed together whatever the number of ranks is."""
    assert slice_rows(8, 2, 2) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
    assert slice_rows(8, 1, 2) == [[range(4), range(4, 8)]]
