"""Schedules and stages of a pipeline."""

from __future__ import annotations

from tests.mutants.model import Mutant

PIPELINE = "parallel/pipeline/"
SCHEDULES = "parallel/pipeline/schedules/"
BALANCE = "tests/parallel/pipeline/test_balance.py::test_"
TEST_SCHEDULES = "tests/parallel/pipeline/test_schedules.py::test_"
SLICES = "tests/parallel/pipeline/test_sequence_slices.py::test_"
SPLIT = "tests/parallel/pipeline/test_split.py::test_"


MUTANTS = (
    Mutant(
        "a schedule in which ranks wait for each other is taken",
        f"{SCHEDULES}validate.py",
        "        if waits:\n",
        "        if False:\n",
        f"{TEST_SCHEDULES}what_is_wrong_with_a_schedule_is_named",
    ),
    Mutant(
        "an action is listed twice",
        f"{SCHEDULES}validate.py",
        "for action, count in counts.items() if count > 1]",
        "for action, count in counts.items() if False]",
        f"{TEST_SCHEDULES}what_is_wrong_with_a_schedule_is_named",
    ),
    Mutant(
        "a backward is missing",
        f"{SCHEDULES}validate.py",
        'if kinds not in ("FB", "FIW"):',
        "if False:",
        f"{TEST_SCHEDULES}what_is_wrong_with_a_schedule_is_named",
    ),
    Mutant(
        "an action precedes its input",
        f"{SCHEDULES}validate.py",
        "            if at[first] > at[action]:",
        "            if False:",
        f"{TEST_SCHEDULES}what_is_wrong_with_a_schedule_is_named",
    ),
    Mutant(
        "a backward does not wait for the next stage",
        f"{SCHEDULES}schedule.py",
        "    if stage + 1 < stages:\n",
        "    if False:\n",
        f"{TEST_SCHEDULES}the_bubble_has_its_closed_form",
    ),
    Mutant(
        "zero bubble has the memory of gpipe",
        f"{SCHEDULES}builders.py",
        "        row = forwards[: ranks - r]\n",
        "        row = forwards[: ranks]\n",
        f"{TEST_SCHEDULES}zero_bubble_leaves_a_third_of_the_bubble",
    ),
    Mutant(
        "zero-bubble-v has no limit of memory",
        f"{SCHEDULES}builders.py",
        'action = None if kind == "F" and full else next(ready, None)',
        "action = next(ready, None)",
        f"{TEST_SCHEDULES}memory_of_the_schedules",
    ),
    Mutant(
        "sends cost nothing",
        f"{SCHEDULES}timeline.py",
        "+ costs.send * (places[one.stage] != rank)",
        "",
        f"{TEST_SCHEDULES}sends_cost_time",
    ),
    Mutant(
        "stages are split by the largest last",
        f"{PIPELINE}balance.py",
        "value = (max(best[start][0], mine), best[start][1] + mine * mine)",
        "value = (best[start][0] + mine, best[start][1] + mine * mine)",
        f"{BALANCE}the_slowest_stage_counts",
    ),
    Mutant(
        "fewer layers than stages",
        f"{PIPELINE}balance.py",
        "    if count < parts:",
        "    if False:",
        f"{BALANCE}each_stage_needs_a_layer",
    ),
    Mutant(
        "slices of sequences run in any order",
        f"{SCHEDULES}validate.py",
        "            if other is not None and at.get(other, -1) > at[action]:",
        "            if False:",
        f"{SLICES}slices_have_an_order",
    ),
    Mutant(
        "a mask shows slices that are not computed yet",
        "parallel/context_parallel/slices.py",
        "        if self._sees_later and bool(torch.stack(self._sees_later).any()):",
        "        if False:",
        f"{SLICES}a_mask_that_shows_later_slices_is_refused",
    ),
    Mutant(
        "a stage without a module",
        f"{PIPELINE}split.py",
        "        if stage not in units.values():",
        "        if False:",
        f"{SPLIT}refusals_name_what_is_wrong",
    ),
)
