"""The scheduler around the state machine: process, service, relays."""

from __future__ import annotations

from tests.mutants.model import Mutant

SCHEDULER = "rendezvous/scheduler/"
JOURNAL = "tests/rendezvous/journal/test_journal.py::test_"
SUCCESSOR_TIME = "tests/rendezvous/journal/test_successor_time.py::test_"
LOCAL_LINK = "tests/rendezvous/scheduler/test_local_link.py::test_"
RELAY_ANSWERS = "tests/rendezvous/scheduler/test_relay_answers.py::test_"
RECOVERY = "tests/rendezvous/scheduler/test_recovery.py::test_"
SERVICE = "tests/rendezvous/scheduler/test_service.py::test_"
SILENT_SUCCESSOR = "tests/rendezvous/scheduler/test_silent_successor.py::test_"
SOCKETS = "tests/rendezvous/scheduler/test_sockets.py::test_"


MUTANTS = (
    Mutant(
        "a successor that never answers is not killed",
        f"{SCHEDULER}child.py",
        "            self._process.kill()  # `fileno` reports its end\n",
        "",
        f"{SILENT_SUCCESSOR}a_successor_that_never_answers_is_killed",
    ),
    Mutant(
        "a scheduler that dies after the verdict keeps it from others",
        f"{SCHEDULER}child.py",
        "                self._tell_others(self._verdict)\n",
        "                pass\n",
        f"{RECOVERY}a_scheduler_that_dies_after_the_verdict_leaves_nobody_without_it",
    ),
    Mutant(
        "a scheduler is started again without end",
        f"{SCHEDULER}child.py",
        "if len(self._death_times) >= MAX_RESTARTS:",
        "if False:",
        f"{SILENT_SUCCESSOR}it_is_started_again_three_times",
    ),
    Mutant(
        "a successor starts without a journal",
        f"{SCHEDULER}child.py",
        "        if self._journal is None:\n            self._give_up(died)",
        "        if False:\n            self._give_up(died)",
        f"{SILENT_SUCCESSOR}without_a_journal_it_has_no_successor",
    ),
    Mutant(
        "a successor starts from an empty journal",
        f"{SCHEDULER}child.py",
        "if not there.result():",
        "if False:",
        f"{SILENT_SUCCESSOR}without_a_journal_it_has_no_successor",
    ),
    Mutant(
        "a journal that was given up is resumed",
        f"{SCHEDULER}child.py",
        "self._journal = None  # the file, if it is still there, is out of date",
        "pass",
        f"{SILENT_SUCCESSOR}from_a_journal_that_it_has_given_up_nobody_goes_on",
    ),
    Mutant(
        "a noisy sitecustomize is taken for the scheduler",
        f"{SCHEDULER}child.py",
        "if isinstance(answer, dict) and answer.keys()",
        "if True or answer.keys()",
        f"{SILENT_SUCCESSOR}what_a_sitecustomize_prints_is_no_answer",
    ),
    Mutant(
        "the scheduler outlives its agent",
        f"{SCHEDULER}child_main.py",
        "                leave_at = clock.monotonic()\n",
        "                pass\n",
        f"{SOCKETS}the_scheduler_does_not_outlive_its_agent",
    ),
    Mutant(
        "the clock of the predecessor goes back",
        f"{SCHEDULER}service.py",
        "self.clock.monotonic() + self._recovery.clock_shift",
        "self.clock.monotonic()",
        f"{SUCCESSOR_TIME}time_goes_on_where_the_predecessor_was",
    ),
    Mutant(
        "actions are carried out before the journal",
        f"{SCHEDULER}service.py",
        "if lost := self._recovery.commit():",
        "if lost := '':",
        f"{JOURNAL}a_full_disk_costs_the_way_back_and_not_the_job",
    ),
    Mutant(
        "message numbers are not checked",
        f"{SCHEDULER}service.py",
        "if envelope.sequence != due:",
        "if False:",
        f"{SERVICE}a_connection_keeps_to_its_order",
    ),
    Mutant(
        "a key of one role speaks for another",
        f"{SCHEDULER}service.py",
        "if item.role and item.role != hello.role:",
        "if False:",
        f"{SERVICE}a_key_of_one_role_makes_no_connection_of_another",
    ),
    Mutant(
        "one connection speaks for two agents",
        f"{SCHEDULER}service.py",
        ("if (envelope.sender, envelope.incarnation) != (hello.agent, hello.incarnation):"),
        "if False:",
        f"{SERVICE}a_connection_keeps_to_its_order",
    ),
    Mutant(
        "who was refused is still heard",
        f"{SCHEDULER}service.py",
        "        if item.peer in self._ignored_peers:\n            return None\n",
        "",
        f"{SERVICE}who_was_refused_is_not_heard_any_more",
    ),
    Mutant(
        "a status grows without limit",
        f"{SCHEDULER}service.py",
        "while self._lines_chars > MAX_STATUS_CHARS and len(self._lines) > 1:",
        "while False:",
        f"{LOCAL_LINK}status_is_cut_to_the_newest_lines",
    ),
    Mutant(
        "refusals fill the event log",
        f"{SCHEDULER}service.py",
        "if len(self._refusals) >= MAX_REFUSALS:",
        "if False:",
        f"{SERVICE}a_stream_of_refusals_does_not_fill_the_event_log",
    ),
    Mutant(
        "a relay answers for a scheduler that is silent",
        f"{SCHEDULER}relay.py",
        "if now - self._answered_at < FRESH_SECONDS:",
        "if True:",
        f"{RELAY_ANSWERS}heartbeats_are_answered_as_long_as_the_scheduler_answers",
    ),
    Mutant(
        "a relay reports agents that receive nothing",
        f"{SCHEDULER}relay.py",
        "if beat - echo <= 2:",
        "if True:",
        f"{RELAY_ANSWERS}agents_that_receive_nothing_are_not_reported_as_alive",
    ),
    Mutant(
        "a relay forgets the end of an agent",
        f"{SCHEDULER}relay.py",
        "            items.append(AgentClosed(number))",
        "            pass",
        f"{RELAY_ANSWERS}the_end_of_an_agent_is_told",
    ),
    Mutant(
        "a relay takes relays for agents",
        f"{SCHEDULER}relay.py",
        '    roles = ("agent", "view")\n',
        '    roles = ("agent", "view", "relay")\n',
        f"{RELAY_ANSWERS}a_relay_takes_no_relays",
    ),
)
