"""Checkpoints: completeness, damage, other runs."""

from __future__ import annotations

from tests.mutants.model import Mutant

CHECKPOINT = "parallel/checkpoint/"
DAMAGED = "tests/parallel/checkpoint/test_damaged.py::test_"
FOLDERS = "tests/parallel/checkpoint/test_folders.py::test_"
HEADER_LIMITS = "tests/parallel/checkpoint/test_header_limits.py::test_"
REGIONS = "tests/parallel/checkpoint/test_regions.py::test_"
TRANSFORM = "tests/parallel/checkpoint/test_transform.py::test_"
GUARD = "tests/parallel/training/test_guard.py::test_"


MUTANTS = (
    Mutant(
        "a flipped bit is loaded",
        f"{CHECKPOINT}reader.py",
        "        if not right:\n",
        "        if False:\n",
        f"{DAMAGED}only_regular_files_of_the_format_are_read",
    ),
    Mutant(
        "missing elements are not noticed",
        f"{CHECKPOINT}reader.py",
        "        if covered < region.stop:",
        "        if False:",
        f"{REGIONS}what_is_missing_or_damaged_is_reported",
    ),
    Mutant(
        "every file is opened for a part",
        f"{CHECKPOINT}storage.py",
        "        if copies:\n            yield piece, copies",
        "        yield piece, copies",
        f"{REGIONS}only_what_is_needed_is_opened",
    ),
    Mutant(
        "a checkpoint that is not complete is listed",
        f"{CHECKPOINT}storage.py",
        "step.isdecimal() and _is_complete(path)",
        "step.isdecimal()",
        f"{FOLDERS}a_folder_without_its_last_file_is_no_checkpoint",
    ),
    Mutant(
        "a checkpoint that was being replaced is lost",
        f"{CHECKPOINT}storage.py",
        'f".old-{FOLDER_PREFIX}{step}")',
        '"")',
        f"{FOLDERS}what_was_being_replaced_counts_until_its_successor_is_there",
    ),
    Mutant(
        "a save writes into the old folder",
        f"{CHECKPOINT}storage.py",
        "        final.rename(old)\n",
        "        pass\n",
        f"{FOLDERS}a_complete_checkpoint_replaces_another_of_its_step",
    ),
    Mutant(
        "the oldest checkpoint is kept",
        f"{CHECKPOINT}storage.py",
        "list_checkpoints(folder)[:-keep]",
        "list_checkpoints(folder)[keep:]",
        f"{FOLDERS}the_newest_is_the_one_that_was_written_last",
    ),
    Mutant(
        "the newest checkpoint is the one with most steps",
        f"{CHECKPOINT}storage.py",
        "sorted((read_turn(path), step, path)",
        "sorted((0, step, path)",
        f"{FOLDERS}the_newest_is_the_one_that_was_written_last",
    ),
    Mutant(
        "pieces share elements twice",
        f"{CHECKPOINT}regions.py",
        "        if a.tensor_offset + a.count <= b.tensor_offset + b.count:",
        "        if a.tensor_offset <= b.tensor_offset:",
        f"{REGIONS}any_parts_are_made_of_any_others",
    ),
    Mutant(
        "a transform replaces a checkpoint",
        f"{CHECKPOINT}transform.py",
        "    if final.exists():\n",
        "    if False:\n",
        f"{TRANSFORM}another_of_that_name_is_not_replaced",
    ),
    Mutant(
        "a mesh of any number of ranks",
        f"{CHECKPOINT}transform.py",
        "    if grid.size > MAX_RANKS:",
        "    if False:",
        f"{TRANSFORM}a_mesh_of_more_ranks_than_any_job_has_is_refused",
    ),
    Mutant(
        "a checkpoint of another optimizer is loaded",
        f"{CHECKPOINT}compatibility.py",
        "        if here != there:\n            saved_kind",
        "        if False:\n            saved_kind",
        f"{GUARD}a_checkpoint_of_another_optimizer_is_told",
    ),
    Mutant(
        "another run's checkpoint is replaced",
        f"{CHECKPOINT}save.py",
        ('        raise UsageError(what, where=RUN_SAVE, hint="use one folder per run")'),
        "        pass",
        f"{FOLDERS}another_runs_checkpoint_is_not_replaced",
    ),
    Mutant(
        "a last save that fails is silent",
        f"{CHECKPOINT}save.py",
        "        atexit.register(self._report_failure)\n",
        "",
        f"{FOLDERS}a_save_that_fails_after_the_last_step_is_told",
    ),
    Mutant(
        "a header of any length is read",
        f"{CHECKPOINT}safetensors.py",
        "if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):",
        "if False:",
        f"{HEADER_LIMITS}a_header_of_a_wrong_length_is_not_read",
    ),
)
