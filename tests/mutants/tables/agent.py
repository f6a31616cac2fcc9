"""The agent of a node: stops, leases, reports, hangs, causes."""

from __future__ import annotations

from tests.mutants.model import Mutant

AGENT = "launcher/agent/"
DIAGNOSIS = "launcher/diagnosis/"
CHANNEL = "tests/launcher/agent/test_channel.py::test_"
CONVERSATION = "tests/launcher/agent/test_conversation.py::test_"
GENERATION_ORDER = "tests/launcher/agent/test_generation_order.py::test_"
MONITOR = "tests/launcher/agent/test_monitor.py::test_"
SHUTDOWN = "tests/launcher/agent/test_shutdown.py::test_"
STORE = "tests/launcher/agent/test_store.py::test_"
WORKER_GROUP = "tests/launcher/agent/test_worker_group.py::test_"
CAUSES = "tests/launcher/diagnosis/test_causes.py::test_"
HANGS = "tests/launcher/diagnosis/test_hangs.py::test_"


MUTANTS = (
    Mutant(
        "the workers of a cut-off node run on",
        f"{AGENT}agent.py",
        "if shutdown.is_lease_over(self._link.cut_off_for()):",
        "if False:",
        (f"{CONVERSATION}the_workers_of_a_node_that_is_cut_off_are_gone_before_the_others_go_on"),
    ),
    Mutant(
        "the last steps of a worker come after its exit",
        f"{AGENT}generation.py",
        "self._monitor.send_last_progress()",
        "self._monitor.send_progress()",
        f"{MONITOR}the_last_report_of_a_worker_comes_before_its_exit",
    ),
    Mutant(
        "the end of the lifeline is overlooked",
        f"{AGENT}agent.py",
        "if lifeline in ready and not self._read_lifeline(lifeline):",
        "if False:",
        f"{CONVERSATION}the_end_of_the_lifeline_ends_everything_at_once",
    ),
    Mutant(
        "a stop without an answer is waited for",
        f"{AGENT}shutdown.py",
        "return self.answer_deadline is not None and now >= self.answer_deadline",
        "return False",
        f"{CONVERSATION}a_stop_that_nobody_answers_is_carried_out_alone",
    ),
    Mutant(
        "the lease is that of the scheduler's node, too",
        f"{AGENT}shutdown.py",
        "self.lease = 0.0 if is_scheduler_node else welcome.lease",
        "self.lease = welcome.lease",
        f"{SHUTDOWN}the_fence_is_the_links_with_a_lease_and_this_process_alone_without",
    ),
    Mutant(
        "a stall of the agent may last as long as the silence",
        f"{AGENT}shutdown.py",
        "stall = welcome.dead - 2 * welcome.heartbeat - fence_margin(welcome.dead)",
        "stall = welcome.dead",
        f"{SHUTDOWN}the_fence_is_the_links_with_a_lease_and_this_process_alone_without",
    ),
    Mutant(
        "a second SIGTERM means this node alone",
        f"{AGENT}shutdown.py",
        "is_first = self.stop_count == 0 and self.exit_code is None",
        "is_first = True",
        f"{SHUTDOWN}only_a_first_sigterm_means_this_node",
    ),
    Mutant(
        "a second stop is as gentle as the first",
        f"{AGENT}shutdown.py",
        "            self._generation.stop_workers(signal.SIGKILL, 0.0)",
        "            pass",
        f"{CONVERSATION}the_second_stop_kills_here_without_asking_anybody",
    ),
    Mutant(
        "a node that was given up goes on",
        f"{AGENT}shutdown.py",
        "self.stop_and_rejoin(0.0)",
        "pass",
        f"{CONVERSATION}a_node_that_was_given_up_ends_its_workers_and_joins_as_a_new_one",
    ),
    Mutant(
        "an assignment is carried out twice",
        f"{AGENT}generation.py",
        "message.generation <= self._assign.generation:",
        "False:",
        f"{CONVERSATION}what_is_repeated_after_a_reconnection_is_done_once",
    ),
    Mutant(
        "workers of a generation start twice",
        f"{AGENT}generation.py",
        "        if group.has_started:\n            return\n        supervisor",
        "        supervisor",
        f"{GENERATION_ORDER}workers_that_run_are_not_started_again",
    ),
    Mutant(
        "a start of another generation starts this one",
        f"{AGENT}generation.py",
        "group is None or group.generation != generation or",
        "group is None or",
        f"{GENERATION_ORDER}a_start_of_another_generation_starts_nobody",
    ),
    Mutant(
        "a restart reads the store of before",
        f"{AGENT}generation.py",
        "            self._helpers.stores.advance(self._helpers.supervisor)",
        "            pass",
        f"{GENERATION_ORDER}the_store_of_a_restart_is_the_one_that_was_announced_for_it",
    ),
    Mutant(
        "reports of any size are parsed",
        f"{AGENT}channel.py",
        "    if len(data) > MAX_DATAGRAM_BYTES:\n",
        "    if False:\n",
        f"{CHANNEL}what_no_worker_says_is_nothing",
    ),
    Mutant(
        "a report with unknown fields is taken",
        f"{AGENT}channel.py",
        'if not {"rank", "generation"} <= found.keys() <= {',
        'if not {"rank", "generation"} <= found.keys() or not {',
        f"{CHANNEL}what_no_worker_says_is_nothing",
    ),
    Mutant(
        "a report with a boolean rank is taken",
        f"{AGENT}channel.py",
        "type(found[name]) is int and",
        "isinstance(found[name], int) and",
        f"{CHANNEL}what_no_worker_says_is_nothing",
    ),
    Mutant(
        "the folder of a living agent is removed",
        f"{AGENT}channel.py",
        "        except ConnectionRefusedError:\n",
        "        except (ConnectionRefusedError, FileNotFoundError):\n",
        f"{CHANNEL}what_killed_agents_left_is_removed_and_nothing_else",
    ),
    Mutant(
        "helpers of a worker report for it",
        f"{AGENT}monitor.py",
        "return not pid or not report.pid or report.pid == pid",
        "return True",
        f"{MONITOR}only_a_worker_of_this_generation_counts",
    ),
    Mutant(
        "a step is saved when one worker has saved it",
        f"{AGENT}monitor.py",
        "saved = min((self._saved_steps.get(rank, -1)",
        "saved = max((self._saved_steps.get(rank, -1)",
        f"{MONITOR}progress_is_told_once_a_second_with_what_changed",
    ),
    Mutant(
        "a worker that waits for a busy one hangs",
        f"{AGENT}monitor.py",
        "if found.only_if_ended or (found.may_be_waiting and is_any_working):",
        "if found.only_if_ended:",
        f"{MONITOR}no_progress_is_a_hang_that_is_told_once",
    ),
    Mutant(
        "a hang is reported at every look",
        f"{AGENT}monitor.py",
        "            self._closed_ranks.add(rank)\n",
        "            pass\n",
        f"{MONITOR}no_progress_is_a_hang_that_is_told_once",
    ),
    Mutant(
        "a stall of the agent makes workers hang",
        f"{DIAGNOSIS}hangs.py",
        "passed = min(now - self._last_at, self._max_gap)",
        "passed = now - self._last_at",
        f"{HANGS}a_stall_of_the_agent_makes_nobody_hang",
    ),
    Mutant(
        "a debugger makes a worker hang",
        f"{DIAGNOSIS}hangs.py",
        "if has_moved or seen.is_traced:",
        "if has_moved:",
        f"{HANGS}a_debugger_stops_the_clock",
    ),
    Mutant(
        "CPU time hides a lack of progress",
        f"{DIAGNOSIS}hangs.py",
        "if has_moved or seen.is_traced:",
        "if has_moved or has_worked or seen.is_traced:",
        f"{HANGS}without_a_new_step_for_the_timeout_it_hangs_even_if_it_spins",
    ),
    Mutant(
        "a victim is reported before the cause",
        f"{AGENT}worker_group.py",
        "worker.report_at = self._clock.monotonic() + SETTLE_SECONDS",
        "worker.report_at = 0.0",
        f"{WORKER_GROUP}a_victim_alone_is_reported_after_the_settling",
    ),
    Mutant(
        "a worker that ignores SIGTERM is never killed",
        f"{AGENT}worker_group.py",
        "                self._send_signal(worker, signal.SIGKILL, group=True)",
        "                pass",
        f"{WORKER_GROUP}stop_signals_leader_or_group_and_kills_at_grace",
    ),
    Mutant(
        "a worker that is ending is stopped at once",
        f"{AGENT}worker_group.py",
        "return min(STOP_DELAY_SECONDS, grace / 2)",
        "return 0.0",
        f"{WORKER_GROUP}what_ended_before_the_stop_keeps_its_cause",
    ),
    Mutant(
        "an unkillable worker is waited for",
        f"{AGENT}worker_group.py",
        "if self._give_up_at is not None and now >= self._give_up_at:",
        "if False:",
        f"{WORKER_GROUP}what_cannot_be_killed_is_named_and_left",
    ),
    Mutant(
        "a suspended worker does not hear the order",
        f"{AGENT}worker_group.py",
        "if number != signal.SIGKILL and is_suspended(worker.pid):",
        "if False:",
        (f"{WORKER_GROUP}a_worker_that_somebody_stopped_is_continued_so_that_it_hears_the_order"),
    ),
    Mutant(
        "a sweep without an answer holds the report",
        f"{AGENT}worker_group.py",
        "worker.report_at = self._clock.monotonic() + SWEEP_SECONDS",
        "worker.report_at = float('inf')",
        f"{WORKER_GROUP}a_slow_sweep_does_not_hold_the_report_for_ever",
    ),
    Mutant(
        "the store of the next generation is this one",
        f"{AGENT}store.py",
        "        self._current = self._next\n        self._next = None",
        "        self._next = None",
        f"{STORE}a_generation_gets_the_socket_that_was_announced",
    ),
    Mutant(
        "a victim's error is its own",
        f"{DIAGNOSIS}causes.py",
        "if error.type in _DISTRIBUTED_ERRORS or _PEER_GONE.search(error.text):",
        "if False:",
        f"{CAUSES}exceptions",
    ),
    Mutant(
        "an own fault is a victim's",
        f"{DIAGNOSIS}causes.py",
        "    if _OWN_FAULT.search(error.text):\n        return False\n",
        "",
        f"{CAUSES}exceptions",
    ),
    Mutant(
        "what pdrun ended is the worker's fault",
        f"{DIAGNOSIS}causes.py",
        "        evidence.stopped_at is not None\n        and (crash",
        "        False\n        and (crash",
        f"{CAUSES}what_ends_after_our_order_is_stopped",
    ),
)
