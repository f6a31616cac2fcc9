"""Steps, data, random numbers, meshes and waits for other ranks."""

from __future__ import annotations

from tests.mutants.model import Mutant

COMM = "parallel/comm/"
DATA = "parallel/data/"
RNG = "parallel/rng/"
TRAINING = "parallel/training/"
WATCHDOG = "tests/parallel/comm/test_watchdog.py::test_"
LOADER = "tests/parallel/data/test_loader.py::test_"
WITHOUT_GROUPS = "tests/parallel/test_without_groups.py::test_"
GUARD = "tests/parallel/training/test_guard.py::test_"
HABITS = "tests/parallel/training/test_loop_habits.py::test_"
BUFFERS = "tests/parallel/training/test_forward_buffers.py::test_"
LOSS_CHECK = "tests/parallel/training/test_loss_check.py::test_"
RANK_AGREEMENT = "tests/parallel/training/test_rank_agreement.py::test_"
TURN_TAKING = "tests/parallel/training/test_turn_taking.py::test_"
AGREEMENT = "tests/parallel/zero/test_agreement.py::test_"


MUTANTS = (
    Mutant(
        "slices depend on the ranks",
        f"{DATA}batch_slicing.py",
        "pieces[a * world + rank] for a in range(accumulate)",
        "pieces[rank * accumulate + a] for a in range(accumulate)",
        f"{AGREEMENT}each_micro_batch_has_neighbouring_rows_of_all_ranks",
    ),
    Mutant(
        "tensors with different rows are sliced",
        f"{DATA}batch_slicing.py",
        "    if len(set(found.values())) > 1:",
        "    if False:",
        f"{WITHOUT_GROUPS}wrong_batches",
    ),
    Mutant(
        "every rank reads every row",
        f"{DATA}loader.py",
        "slice_rows(len(batch), world, accumulate)[rank]",
        "slice_rows(len(batch), 1, accumulate)[0]",
        f"{LOADER}the_samples_do_not_depend_on_the_ranks",
    ),
    Mutant(
        "a checkpoint that was loaded in part is trained",
        f"{TRAINING}guard.py",
        "        if self.torn_checkpoint:",
        "        if False:",
        f"{GUARD}what_was_loaded_in_part_is_not_trained",
    ),
    Mutant(
        "ranks with other arguments go on",
        f"{TRAINING}rank_agreement.py",
        "        if self._store.get(key).decode() != digest:",
        "        if False:",
        f"{RANK_AGREEMENT}the_first_difference_is_named",
    ),
    Mutant(
        "sets are compared in their order",
        f"{TRAINING}rank_agreement.py",
        '", ".join(sorted(map(to_text, value)))',
        '", ".join(map(to_text, value))',
        f"{RANK_AGREEMENT}what_is_compared",
    ),
    Mutant(
        "two copies run at a time",
        f"{TRAINING}turn_taking.py",
        "self._turn == index or self._error is not None",
        "True",
        f"{TURN_TAKING}threads_run_one_at_a_time_in_the_order_of_the_round",
    ),
    Mutant(
        "a mask of a shard is not part of the whole",
        f"{RNG}shard_region.py",
        "found.unsqueeze(-1) + along * torch.Size(whole[dim + 1 :]).numel()",
        "found.unsqueeze(-1) + along * torch.Size(shape[dim + 1 :]).numel()",
        f"{AGREEMENT}the_elements_of_a_shard_have_their_numbers_in_the_full_tensor",
    ),
    Mutant(
        "a lost peer is any error",
        f"{COMM}watchdog.py",
        "if gone := _PEER_GONE.search(str(error)):",
        "if gone := None:",
        f"{WATCHDOG}a_peer_that_is_gone_is_named_in_one_line",
    ),
    Mutant(
        "a wait that was late is a lost peer",
        f"{COMM}watchdog.py",
        "time.monotonic() - begin >= self.seconds * 0.9",
        "False",
        f"{WATCHDOG}who_is_left_by_one_whose_time_was_over_is_late_too",
    ),
    Mutant(
        "degrees that do not fit the devices",
        f"{COMM}mesh.py",
        "    elif free or fixed != world:",
        "    elif False:",
        f"{WITHOUT_GROUPS}wrong_degrees_are_refused",
    ),
    Mutant(
        "weights that are copies may change",
        f"{TRAINING}guard.py",
        "            if weight.name in changed:",
        "            if False:",
        f"{GUARD}a_weight_that_is_a_copy_may_not_change",
    ),
    Mutant(
        "groups may come late",
        f"{TRAINING}guard.py",
        "        if sizes != self._groups and self._engine.is_retargeted:",
        "        if False:",
        f"{GUARD}a_group_that_comes_late_is_refused",
    ),
    Mutant(
        "a parameter that is replaced is not trained",
        f"{TRAINING}guard.py",
        "            if id(param) not in known:",
        "            if False:",
        f"{HABITS}habits_are_refused[parameter]",
    ),
    Mutant(
        "a loop steps the optimizer by itself",
        f"{TRAINING}state.py",
        "        if not owner.is_updating:",
        "        if False:",
        f"{HABITS}habits_are_refused[step]",
    ),
    Mutant(
        "micro-batches read each other's state",
        f"{TRAINING}forward_buffers.py",
        "        if has_rows and self._forwards > 1:",
        "        if False:",
        f"{BUFFERS}a_state_that_other_rows_would_get_is_refused",
    ),
    Mutant(
        "a mean over weighted labels weighs by rows",
        f"{TRAINING}loss_check.py",
        "            if abs(weight - term.labels) > TOLERANCE * term.labels:",
        "            if False:",
        f"{LOSS_CHECK}a_mean_over_weighted_labels_is_refused[weighted]",
    ),
)
