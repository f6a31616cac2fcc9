"""The fence: workers end before others start, and no earlier generation completes a save."""

from __future__ import annotations

from tests.mutants.model import Mutant

STDLIB_ONLY = "launcher/stdlib_only/"
AGENT = "launcher/agent/"
TRANSPORT = "rendezvous/transport/"
SCHEDULER = "rendezvous/scheduler/"
CHECKPOINT = "parallel/checkpoint/"
FENCE = "tests/launcher/supervisor/test_fence.py::test_"
TIMER = "tests/rendezvous/transport/test_fence_timer.py::test_"
CONVERSATION = "tests/launcher/agent/test_conversation.py::test_"
STANDSTILL = "tests/rendezvous/scheduler/test_standstill.py::test_"
FENCING = "tests/parallel/checkpoint/test_fencing.py::test_"


MUTANTS = (
    Mutant(
        "the supervisor of a stopped agent keeps its workers",
        f"{STDLIB_ONLY}supervisor.py",
        "        return not self.fence.is_over(time.monotonic())\n",
        "        return True\n",
        f"{FENCE}workers_end_at_the_fence[agent]",
    ),
    Mutant(
        "the watchdog does not know the fence",
        f"{STDLIB_ONLY}supervisor.py",
        '            watchdog.write_fence(self.watchdog_pipe, message["fence"])\n',
        "",
        f"{FENCE}workers_end_at_the_fence[agent and supervisor]",
    ),
    Mutant(
        "a machine that stood still is not given time",
        f"{STDLIB_ONLY}watchdog.py",
        "            self.recheck_until = now + RECHECK_SECONDS\n",
        "            pass\n",
        f"{FENCE}what_one_process_judges",
    ),
    Mutant(
        "a fence is not lifted",
        "launcher/supervisor/client.py",
        '            self._send_message({"op": "ping", "fence": None})\n',
        "            pass\n",
        f"{FENCE}a_fence_is_lifted_when_no_worker_runs",
    ),
    Mutant(
        "workers start without a fence",
        f"{AGENT}generation.py",
        "        self._helpers.send_ping()  # no worker runs without a fence\n",
        "",
        f"{CONVERSATION}no_worker_is_started_without_a_fence",
    ),
    Mutant(
        "a node that was given up gives its workers grace",
        f"{AGENT}shutdown.py",
        "            self.stop_and_rejoin(0.0)  # others may run in its place already\n",
        "            self.stop_and_rejoin(plan.spec.policy.grace)\n",
        f"{CONVERSATION}a_node_that_was_given_up_ends_its_workers_and_joins_as_a_new_one",
    ),
    Mutant(
        "fenced workers are reported by a node that was given up",
        f"{AGENT}helpers.py",
        "                self._on_fenced()\n",
        "                pass\n",
        f"{CONVERSATION}a_node_whose_workers_were_fenced_rejoins_and_reports_nothing",
    ),
    Mutant(
        "what is unanswered does not date contact back",
        f"{TRANSPORT}resend.py",
        "        self._sent_beats.append((beat.number, now - behind))\n",
        "        self._sent_beats.append((beat.number, now))\n",
        f"{TIMER}an_answer_that_is_missing_dates_the_contact_back",
    ),
    Mutant(
        "what a lost connection sent counts as contact",
        f"{TRANSPORT}resend.py",
        "        self._sent_beats.clear()\n",
        "",
        f"{TIMER}a_new_connection_counts_from_its_hello_and_forgets_what_the_old_one_sent",
    ),
    Mutant(
        "a scheduler that stands still is kept",
        f"{SCHEDULER}child.py",
        "        if self._pings.is_frozen():\n",
        "        if False:\n",
        f"{STANDSTILL}one_that_stands_still_is_ended_and_resumed[False]",
    ),
    Mutant(
        "a scheduler that runs does not answer",
        f"{SCHEDULER}child_main.py",
        "            _send_answer(ALIVE)\n",
        "            pass\n",
        f"{STANDSTILL}one_that_runs_answers",
    ),
    Mutant(
        "a stop does not wait for a scheduler that stands still",
        f"{AGENT}shutdown.py",
        "        return self.stop_count == 1 and is_frozen and not is_late\n",
        "        return False\n",
        f"{CONVERSATION}a_stop_waits_for_a_scheduler_that_stands_still",
    ),
    Mutant(
        "a save does not look for later generations",
        f"{CHECKPOINT}save.py",
        "        # A claim before mkdir has left its marker; one after it renames the folder.\n"
        "        fence.check()\n",
        "        pass\n",
        f"{FENCING}nothing_is_published_after_a_claim_at_any_moment_of_the_save",
    ),
    Mutant(
        "a claim removes hidden folders bit by bit",
        f"{CHECKPOINT}fencing.py",
        "        path.rename(gone)\n",
        "        gone = path\n",
        f"{FENCING}nothing_is_published_after_a_claim_at_any_moment_of_the_save",
    ),
    Mutant(
        "a generation does not claim what it loads",
        f"{CHECKPOINT}load.py",
        "GenerationFence.of_worker(folder.parent if is_itself else folder).claim_to_load()\n",
        "pass\n",
        f"{FENCING}a_later_generation_claims_what_it_loads",
    ),
)
