"""Decisions of the scheduler: first cause, restarts, hangs, stragglers."""

from __future__ import annotations

from tests.mutants.model import Mutant

POLICIES = "rendezvous/policies/"
FAILURE_TO_VERDICT = "tests/rendezvous/membership/test_failure_to_verdict.py::test_"
WORK_PER_EVENT = "tests/rendezvous/membership/test_work_per_event.py::test_"
HANG_REPORT = "tests/rendezvous/policies/test_hang_report.py::test_"
MANY_STACKS = "tests/rendezvous/policies/test_many_stacks.py::test_"
PROGRESS = "tests/rendezvous/policies/test_progress.py::test_"
RESTART = "tests/rendezvous/policies/test_restart.py::test_"


MUTANTS = (
    Mutant(
        "a victim of a lost peer is the first cause",
        f"{POLICIES}verdict.py",
        '    "communication": 5,',
        '    "communication": 0,',
        f"{RESTART}the_code_of_the_first_cause_decides_not_that_of_a_victim",
    ),
    Mutant(
        "clocks of two nodes are compared",
        f"{POLICIES}verdict.py",
        "there = [item for item in alike if item.failure.node == node]",
        "there = alike",
        f"{FAILURE_TO_VERDICT}inside_a_node_its_clock_counts_between_nodes_the_arrival",
    ),
    Mutant(
        "a verdict does not fit in a message",
        f"{POLICIES}verdict.py",
        "traceback=cause.traceback[-_OTHER_TRACEBACK_CHARS:],",
        "",
        f"{FAILURE_TO_VERDICT}a_verdict_fits_in_a_message",
    ),
    Mutant(
        "an exit code of 0 hides a failure",
        f"{POLICIES}verdict.py",
        "code = first.failure.cause.code or 1",
        "code = first.failure.cause.code",
        f"{FAILURE_TO_VERDICT}a_zero_code_never_hides_a_failure",
    ),
    Mutant(
        "all texts of a hundred thousand failures are kept",
        f"{POLICIES}verdict.py",
        "_trim_failure(new.failure) if keep else _strip_failure(new.failure)",
        "new.failure",
        f"{WORK_PER_EVENT}a_hundred_thousand_failures_need_little_memory",
    ),
    Mutant(
        "restarts outside the window count",
        f"{POLICIES}restart.py",
        "if now - at < config.restart_window)",
        ")",
        f"{RESTART}the_window_in_a_job",
    ),
    Mutant(
        "quick restarts follow without a delay",
        f"{POLICIES}restart.py",
        "if attempts.quick_restarts < 2:",
        "if True:",
        f"{RESTART}the_delay_doubles_while_restarts_follow_quickly",
    ),
    Mutant(
        "a crash loop never ends",
        f"{POLICIES}restart.py",
        "if attempts.repeats >= LOOP_LENGTH:",
        "if False:",
        f"{RESTART}a_crash_loop_ends_at_the_fourth_time",
    ),
    Mutant(
        "an import error is tried again",
        f"{POLICIES}restart.py",
        "if is_permanent([item.failure.cause for item in failures]):",
        "if False:",
        f"{RESTART}hopeless_failures_are_not_tried_again",
    ),
    Mutant(
        "exit codes that forbid a restart are ignored",
        f"{POLICIES}restart.py",
        "if code in config.no_restart_on:",
        "if False:",
        f"{RESTART}exit_codes_decide",
    ),
    Mutant(
        "a node answers for ranks of another one",
        f"{POLICIES}hang_report.py",
        "if rank in left)",
        ")",
        f"{HANG_REPORT}all_have_answered_and_nobody_waits",
    ),
    Mutant(
        "stacks of a large job are unbounded",
        f"{POLICIES}hang_report.py",
        "elif len(self.groups) < MAX_GROUPS:",
        "elif True:",
        f"{MANY_STACKS}stacks_beyond_the_limit_are_only_counted",
    ),
    Mutant(
        "a node answers twice",
        f"{POLICIES}hang_report.py",
        "if self.waiting.pop(agent, None) is None:",
        "if self.waiting.pop(agent, None) is None and False:",
        f"{HANG_REPORT}all_have_answered_and_nobody_waits",
    ),
    Mutant(
        "a repeated report brings an ended worker back",
        f"{POLICIES}progress.py",
        " or item.rank in self._ended_ranks",
        "",
        f"{PROGRESS}the_last_worker_leaves_its_last_step_on_record",
    ),
    Mutant(
        "the agreed step is that of the fastest node",
        f"{POLICIES}progress.py",
        "return max(earlier, min((",
        "return max(earlier, max((",
        f"{PROGRESS}the_agreed_step_is_the_one_that_every_node_has_saved",
    ),
    Mutant(
        "one slow step makes a straggler",
        f"{POLICIES}progress.py",
        "if len(track.busy) >= SLOW_REPORTS",
        "if track.busy",
        f"{PROGRESS}a_worker_whose_own_work_takes_longer_is_named",
    ),
    Mutant(
        "a straggler is named at every look",
        f"{POLICIES}progress.py",
        "now - track.warned_at >= WARN_SECONDS",
        "True",
        f"{PROGRESS}a_worker_that_stays_behind_is_named_once_a_minute",
    ),
    Mutant(
        "time without a scheduler makes stragglers",
        f"{POLICIES}progress.py",
        "                track.behind_since += seconds",
        "                pass",
        f"{PROGRESS}nobody_falls_behind_while_there_is_no_scheduler",
    ),
)
