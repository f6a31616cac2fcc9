"""The parent of all workers: nothing outlives a job, and nothing else is killed."""

from __future__ import annotations

from tests.mutants.model import Mutant

STDLIB_ONLY = "launcher/stdlib_only/"
SUPERVISOR = "launcher/supervisor/"
DEATH_SIGNAL = "tests/launcher/stdlib_only/test_death_signal.py::test_"
DEATH_AND_PIDS = "tests/launcher/supervisor/test_death_and_pids.py::test_"
TEST_SUPERVISOR = "tests/launcher/supervisor/test_supervisor.py::test_"


MUTANTS = (
    Mutant(
        "a supervisor that was killed is a fault of pdrun",
        "launcher/supervisor/client.py",
        "if code < 0 or self._is_frozen:",
        "if False:",
        "tests/launcher/supervisor/test_supervisor.py"
        "::test_killed_keeper_is_a_clear_error_and_leaves_nothing",
    ),
    Mutant(
        "workers outlive a killed supervisor",
        f"{STDLIB_ONLY}worker_exec.py",
        "        process_tree.prctl(process_tree.PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        f"{DEATH_AND_PIDS}the_kernel_kills_a_worker_with_its_keeper",
    ),
    Mutant(
        "a worker of a supervisor that died before prctl lives on",
        f"{STDLIB_ONLY}worker_exec.py",
        (
            "        if os.getppid() != supervisor_pid:\n            os._exit(127)  # it "
            "died before prctl took effect\n"
        ),
        "",
        (
            f"{DEATH_AND_PIDS}a_worker_whose_keeper_died_before_it_asked_for_its_death"
            "_does_not_start"
        ),
    ),
    Mutant(
        "forked workers outlive a killed supervisor",
        f"{STDLIB_ONLY}fork_server.py",
        "            process_tree.prctl(process_tree.PR_SET_PDEATHSIG, 9)\n",
        "",
        f"{DEATH_SIGNAL}the_kernel_kills_a_forked_worker_with_its_keeper",
    ),
    Mutant(
        "a process that took over a pid is killed",
        f"{STDLIB_ONLY}process_tree.py",
        "if now is not None and now.start == target.start and handle >= 0:",
        "if now is not None and handle >= 0:",
        f"{DEATH_AND_PIDS}a_process_that_has_taken_over_a_pid_is_left_alone",
    ),
    Mutant(
        "a process that took over a pid is killed without a descriptor",
        f"{STDLIB_ONLY}process_tree.py",
        "elif handle < 0 and (now is None or now.start == target.start):",
        "elif handle < 0:",
        f"{DEATH_AND_PIDS}a_process_that_has_taken_over_a_pid_is_left_alone",
    ),
    Mutant(
        "children of a process that took over a pid are leftovers",
        f"{STDLIB_ONLY}process_tree.py",
        "if now is None or now.start != parent.start:",
        "if False:",
        f"{DEATH_AND_PIDS}a_process_that_has_taken_over_a_pid_has_no_children_to_kill",
    ),
    Mutant(
        "grandchildren are not found",
        f"{STDLIB_ONLY}process_tree.py",
        "queue.extend(list_children(member))",
        "pass",
        f"{DEATH_AND_PIDS}descendants_are_found_in_all_generations",
    ),
    Mutant(
        "leftovers of another slot are killed",
        f"{STDLIB_ONLY}leftovers.py",
        "        if slot in slots:\n            found.append(root)",
        "        if True:\n            found.append(root)",
        f"{TEST_SUPERVISOR}leftover_is_swept_and_named",
    ),
    Mutant(
        "leftovers that hide are nobody's",
        f"{STDLIB_ONLY}leftovers.py",
        "slots.add(None)  # leftovers without a known slot go with the last worker",
        "pass",
        f"{TEST_SUPERVISOR}leftover_that_hides_goes_with_the_last_worker",
    ),
    Mutant(
        "leftovers have no time to end by themselves",
        f"{STDLIB_ONLY}leftovers.py",
        "self.kill_at = now + SETTLE_SECONDS",
        "self.kill_at = now",
        f"{TEST_SUPERVISOR}helper_that_ends_by_itself_is_left_to_do_so",
    ),
    Mutant(
        "descendants survive the end of the agent",
        f"{STDLIB_ONLY}supervisor.py",
        "            leftovers.kill_all(self)",
        "            pass",
        f"{TEST_SUPERVISOR}close_ends_everything_at_once",
    ),
    Mutant(
        "a slot is used twice",
        f"{STDLIB_ONLY}supervisor.py",
        "if any(child.slot == slot for child in self.processes()):",
        "if False:",
        f"{TEST_SUPERVISOR}taken_slot_is_refused",
    ),
    Mutant(
        "a signal right after the spawn is lost",
        f"{STDLIB_ONLY}supervisor.py",
        "child.pending_signals.append((number, to_group))",
        "pass",
        f"{TEST_SUPERVISOR}signal_right_after_spawn_is_not_lost",
    ),
    Mutant(
        "the supervisor blocks while it sends",
        f"{STDLIB_ONLY}supervisor.py",
        "socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL",
        "socket.MSG_NOSIGNAL",
        f"{DEATH_AND_PIDS}a_full_socket_does_not_block_the_keeper",
    ),
    Mutant(
        "a terminal's signals end the supervisor",
        f"{STDLIB_ONLY}supervisor.py",
        "            signal.signal(number, signal.SIG_IGN)\n",
        "            pass\n",
        f"{TEST_SUPERVISOR}keeper_outlives_the_signals_of_a_terminal_and_of_a_batch_system",
    ),
    Mutant(
        "a supervisor that does not answer is kept",
        f"{SUPERVISOR}client.py",
        "self._is_frozen = self._unanswered >= MAX_UNANSWERED_PINGS",
        "self._is_frozen = False",
        f"{TEST_SUPERVISOR}a_keeper_that_does_not_answer_is_ended",
    ),
    Mutant(
        "a stall of the agent kills the supervisor",
        f"{SUPERVISOR}client.py",
        (
            "                self._unanswered = 0\n                self._is_frozen = "
            "False\n                if data"
        ),
        "                if data",
        f"{TEST_SUPERVISOR}a_keeper_that_does_not_answer_is_ended",
    ),
    Mutant(
        "orphans of a killed supervisor live on",
        f"{SUPERVISOR}client.py",
        ("self._wait_for_exit(0.0 if self._is_frozen else 1.0))\n        self._kill_orphans()\n"),
        "self._wait_for_exit(0.0 if self._is_frozen else 1.0))\n",
        f"{TEST_SUPERVISOR}killed_keeper_is_a_clear_error_and_leaves_nothing",
    ),
    Mutant(
        "the scheduler is killed with the orphans",
        f"{SUPERVISOR}client.py",
        "if child.pid not in self.spared_pids",
        "",
        f"{TEST_SUPERVISOR}killed_keeper_is_a_clear_error_and_leaves_nothing",
    ),
    Mutant(
        "a stopped supervisor does not see the end",
        f"{SUPERVISOR}client.py",
        "        self._signal_supervisor(signal.SIGCONT)\n",
        "",
        f"{TEST_SUPERVISOR}closing_does_not_wait_for_a_stopped_keeper",
    ),
    Mutant(
        "no watchdog is left when agent and supervisor are killed",
        f"{STDLIB_ONLY}watchdog.py",
        "        kill_marked(token)\n    finally",
        "        pass\n    finally",
        f"{TEST_SUPERVISOR}agent_and_keeper_killed_in_one_instant_leave_nothing",
    ),
    Mutant(
        "the watchdog misses what is being forked",
        f"{STDLIB_ONLY}watchdog.py",
        "            empty_rounds = 0\n        time",
        "            pass\n        time",
        f"{DEATH_AND_PIDS}the_one_that_stands_by_looks_again_after_each_find",
    ),
)
