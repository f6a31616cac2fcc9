"""Optimizer levels: flat buffers, sums, gathers, norms, offloading."""

from __future__ import annotations

from tests.mutants.model import Mutant

ZERO = "parallel/zero/"
WITHOUT_GROUPS = "tests/parallel/test_without_groups.py::test_"
AGREEMENT = "tests/parallel/zero/test_agreement.py::test_"


MUTANTS = (
    Mutant(
        "a cut falls inside a vector of a weight",
        f"{ZERO}flat_layout.py",
        "start += _round_up(prod(shape), ALIGN_ELEMENTS)",
        "start += prod(shape)",
        f"{AGREEMENT}each_weight_begins_at_a_vector_of_the_flat_buffer",
    ),
    Mutant(
        "a buffer comes back with another's numbers in its gaps",
        f"{ZERO}gradients.py",
        "flat if used.slot_extents == layout.slot_extents else flat.zero_()",
        "flat",
        f"{WITHOUT_GROUPS}buffers_come_back_with_zeros_between_their_slots",
    ),
    Mutant(
        "sums start in the order of arrival",
        f"{ZERO}bucket_order.py",
        (
            "        while self._next < len(self._order) and "
            "self._is_complete[self._order[self._next]]:\n            self._start_next()"
        ),
        (
            "        self._buckets[index].start_sum() if self._last or "
            "self._buckets[index].reduces_each else None"
        ),
        f"{AGREEMENT}sums_start_in_one_order_whatever_arrives_first",
    ),
    Mutant(
        "units are gathered in each rank's own order",
        f"{ZERO}gather_order.py",
        '            comm.broadcast_first(indices, "the order of the units")',
        "            pass",
        f"{AGREEMENT}units_are_gathered_in_the_order_of_the_first_rank",
    ),
    Mutant(
        "imaginary parts do not count in a norm",
        f"{ZERO}grad_norm.py",
        "tensor = torch.view_as_real(tensor.resolve_conj())",
        "tensor = tensor.real",
        f"{AGREEMENT}the_imaginary_parts_count_in_a_norm",
    ),
    Mutant(
        "gradients are clipped upwards",
        f"{ZERO}grad_norm.py",
        ".clamp(max=1.0)",
        "",
        f"{AGREEMENT}small_gradients_are_not_enlarged",
    ),
    Mutant(
        "a bad step keeps the loss scale",
        f"{ZERO}precision.py",
        "            self.value /= 2",
        "            pass",
        (f"{AGREEMENT}the_loss_scale_is_halved_for_a_bad_step_and_doubled_after_many_good_ones"),
    ),
    Mutant(
        "a weight of the host is tied to one of the device",
        "parallel/zero/offload.py",
        "                if id(param) in mine:",
        "                if False:",
        "tests/parallel/zero/test_host_modules.py::test_what_cannot_be_combined_is_refused",
    ),
)
