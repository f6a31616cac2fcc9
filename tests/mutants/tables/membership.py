"""The state machine: generations, ranks, sizes, stops, timers, legal messages."""

from __future__ import annotations

from tests.mutants.model import Mutant

MEMBERSHIP = "rendezvous/membership/"
ELASTIC_MEMBERSHIP = "tests/rendezvous/membership/test_elastic_membership.py::test_"
FAILURE_TO_VERDICT = "tests/rendezvous/membership/test_failure_to_verdict.py::test_"
GATHERING = "tests/rendezvous/membership/test_gathering.py::test_"
NAMESAKES = "tests/rendezvous/membership/test_namesakes.py::test_"
REPEATS = "tests/rendezvous/membership/test_repeats.py::test_"
RESUME_AFTER_REPLAY = "tests/rendezvous/membership/test_resume_after_replay.py::test_"
HANG_REPORT = "tests/rendezvous/policies/test_hang_report.py::test_"


MUTANTS = (
    Mutant(
        "a finished worker of a dynamic cluster is reported as cut off",
        "rendezvous/membership/departures.py",
        "        if _has_ended(job, member):\n",
        "        if False:\n",
        "tests/rendezvous/membership/test_failure_to_verdict.py"
        "::test_a_finished_worker_that_closes_its_connection_has_ended",
    ),
    Mutant(
        "a worker that is back moves up when another one leaves",
        f"{MEMBERSHIP}nodes.py",
        "is_dynamic and member.index == member.join.node_rank",
        "False",
        f"{NAMESAKES}a_worker_of_a_dynamic_cluster_keeps_the_place_it_asked_for",
    ),
    Mutant(
        "a missing host has another name than in the list",
        f"{MEMBERSHIP}nodes.py",
        "places.get(name, places.get(member.hello.host, member.join.node_rank))",
        "places.get(name)",
        f"{GATHERING}a_missing_host_of_a_list_has_the_name_that_the_list_has",
    ),
    Mutant(
        "an agent that was started again is refused while its earlier connection is open",
        f"{MEMBERSHIP}machine.py",
        "deferred = admission.defer_join(self, peer, session.hello, message, now)",
        "deferred = None",
        f"{NAMESAKES}a_machine_that_lost_power_joins_again_when_it_is_found_lost",
    ),
    Mutant(
        "a scheduler does not wait for a node that it asked to come again",
        f"{MEMBERSHIP}generations.py",
        "not _is_awaited(job.roster, now)",
        "True",
        f"{NAMESAKES}who_was_asked_to_come_again_is_sent_the_verdict",
    ),
    Mutant(
        "a node that was asked to come again is refused when the job is over",
        f"{MEMBERSHIP}admission.py",
        "if job.shutdown.verdict and join.node in job.roster.deferred:",
        "if False:",
        f"{NAMESAKES}who_was_asked_to_come_again_is_sent_the_verdict",
    ),
    Mutant(
        "an agent is replaced before the fence of its workers",
        f"{MEMBERSHIP}admission.py",
        "return old is not find_replaced(job, join, now) or not job.detector.is_expired(old, now)",
        "return old is not find_replaced(job, join, now)",
        f"{NAMESAKES}it_waits_for_the_fence_of_one_whose_silent_connection_has_ended",
    ),
    Mutant(
        "a second agent of a name is never known to be one",
        f"{MEMBERSHIP}failure_detector.py",
        "if member.alive_at <= member.challenge[2]:",
        "if True:",
        f"{NAMESAKES}a_second_agent_on_the_same_host_is_refused_when_the_first_one_has_spoken",
    ),
    Mutant(
        "a rank is refused although its node may have ended",
        f"{MEMBERSHIP}admission.py",
        "old = roster.names.get(join.node, rival)",
        "old = roster.names.get(join.node)",
        f"{NAMESAKES}a_rank_is_free_when_its_silent_node_is_lost",
    ),
    Mutant(
        "a process of a dynamic cluster leaves although it may ask again",
        "rendezvous/clients/member.py",
        "case Refuse(retry=True):",
        "case Refuse(retry=True, code=0):",
        (
            "tests/rendezvous/clients/test_member.py::test_a_process_asks_again_while_an_earlier_"
            "one_of_its_name_may_have_ended"
        ),
    ),
    Mutant(
        "an agent leaves although it may ask again",
        "launcher/agent/shutdown.py",
        "if refuse.retry and not self._state.stop_count:",
        "if is_pod and refuse.retry and not self._state.stop_count:",
        (
            "tests/launcher/agent/test_conversation.py::test_a_node_that_was_started_again_asks_"
            "until_the_earlier_one_is_known_to_live"
        ),
    ),
    Mutant(
        "workers start before every node is ready",
        f"{MEMBERSHIP}generations.py",
        "elif not counts[Phase.JOINED]:",
        "else:",
        (f"{ELASTIC_MEMBERSHIP}it_forms_with_the_least_after_quiet_counted_from_the_last_join"),
    ),
    Mutant(
        "a stop by the user is not the code of the job",
        f"{MEMBERSHIP}generations.py",
        (
            "return make_verdict(\n        job.generation.failures,\n        "
            "restarts=job.shutdown.restarts,\n        code=code,"
        ),
        (
            "return make_verdict(\n        job.generation.failures,\n        "
            "restarts=job.shutdown.restarts,\n        code=None,"
        ),
        f"{ELASTIC_MEMBERSHIP}too_few_left_without_restarts_is_69",
    ),
    Mutant(
        "a silent node is not waited for at a stop",
        f"{MEMBERSHIP}generations.py",
        "seconds = max(seconds, job.detector.times.dead + STOP_REPORT_SECONDS)",
        "pass",
        (
            f"{ELASTIC_MEMBERSHIP}a_silent_node_explains_failures_even_when_its_death_is"
            "_known_after_the_grace"
        ),
    ),
    Mutant(
        "a node that does not report its end stays",
        f"{MEMBERSHIP}generations.py",
        "        fence_member(job.roster, job.outbox, member, why)\n    _plan",
        "        pass\n    _plan",
        f"{ELASTIC_MEMBERSHIP}a_node_that_does_not_report_its_end_is_left_behind",
    ),
    Mutant(
        "the verdict is not sent",
        f"{MEMBERSHIP}generations.py",
        "    job.broadcast(verdict)\n",
        "",
        f"{ELASTIC_MEMBERSHIP}standby_nodes_hear_the_verdict",
    ),
    Mutant(
        "a second stop is as gentle as the first",
        f"{MEMBERSHIP}generations.py",
        "elif force and stop is not None and stop.grace > 0:",
        "elif False:",
        f"{FAILURE_TO_VERDICT}a_second_stop_of_the_same_sender_shortens_others_do_not",
    ),
    Mutant(
        "a failure that must not be tried again is tried again",
        f"{MEMBERSHIP}generations.py",
        "job.restarts_left(now) > 0 and failure.cause.retry",
        "job.restarts_left(now) > 0",
        f"{FAILURE_TO_VERDICT}what_cannot_help_is_not_tried_again",
    ),
    Mutant(
        "ranks depend on the order of the joins",
        f"{MEMBERSHIP}nodes.py",
        "natural_key(m.name)),",
        "m.alive_at),",
        f"{GATHERING}two_nodes_come_together",
    ),
    Mutant(
        "two nodes get one node rank",
        f"{MEMBERSHIP}nodes.py",
        "if rival is not None and join.node_rank is not None:",
        "if False:",
        f"{GATHERING}a_node_that_cannot_be_right_is_refused",
    ),
    Mutant(
        "two nodes get one name",
        f"{MEMBERSHIP}nodes.py",
        "    if namesake is not None:\n",
        "    if False:\n",
        f"{ELASTIC_MEMBERSHIP}a_connected_namesake_is_refused_in_an_elastic_job_too",
    ),
    Mutant(
        "a node without workers joins",
        f"{MEMBERSHIP}nodes.py",
        "not least <= join.workers <= MAX_WORKERS_PER_NODE",
        "join.workers > MAX_WORKERS_PER_NODE",
        f"{GATHERING}a_node_that_cannot_be_right_is_refused",
    ),
    Mutant(
        "local ranks of two nodes on one host collide",
        f"{MEMBERSHIP}nodes.py",
        "        seen[host] += member.join.workers\n",
        "",
        f"{GATHERING}local_ranks_count_the_workers_of_one_host",
    ),
    Mutant(
        "the lease lasts as long as the silence",
        f"{MEMBERSHIP}sizing.py",
        "return dead * 2 / 3 if",
        "return dead if",
        (
            f"{ELASTIC_MEMBERSHIP}the_lease_is_two_thirds_of_dead_where_a_generation_may_form"
            "_without_the_node"
        ),
    ),
    Mutant(
        "a generation forms with too few nodes",
        f"{MEMBERSHIP}sizing.py",
        "return roster.staying_count + incoming >= required_nodes(config)",
        "return True",
        f"{ELASTIC_MEMBERSHIP}too_few_left_without_restarts_is_69",
    ),
    Mutant(
        "a smaller generation forms while a node reconnects",
        f"{MEMBERSHIP}sizing.py",
        "return overdue or (quiet and not job.roster.cut)",
        "return overdue or quiet",
        (f"{ELASTIC_MEMBERSHIP}a_node_that_is_cut_off_is_waited_for_before_the_generation_forms"),
    ),
    Mutant(
        "a job grows while a hang is looked into",
        f"{MEMBERSHIP}sizing.py",
        "if counts[Phase.FINISHED] or job.generation.hang is not None:",
        "if counts[Phase.FINISHED]:",
        f"{ELASTIC_MEMBERSHIP}nothing_grows_while_a_hang_is_looked_into",
    ),
    Mutant(
        "a departing node is chosen again",
        f"{MEMBERSHIP}sizing.py",
        ("staying = [member for member in roster.members.values() if not member.depart_reason]"),
        "staying = list(roster.members.values())",
        f"{ELASTIC_MEMBERSHIP}a_departing_node_that_stays_a_while_is_not_chosen_again",
    ),
    Mutant(
        "a viewer stops the job",
        f"{MEMBERSHIP}machine.py",
        'if session.hello.role == "view":',
        "if False:",
        f"{GATHERING}a_viewer_only_looks",
    ),
    Mutant(
        "the time limit is not kept",
        f"{MEMBERSHIP}timers.py",
        "return limit is not None and now >= limit and job.shutdown.verdict is None",
        "return False",
        f"{FAILURE_TO_VERDICT}the_time_limit",
    ),
    Mutant(
        "joining has no limit",
        f"{MEMBERSHIP}timers.py",
        "elif waited > config.start_timeout:",
        "elif False:",
        f"{ELASTIC_MEMBERSHIP}fewer_than_the_least_end_in_69_and_the_missing_are_counted",
    ),
    Mutant(
        "a successor takes its absence for lateness",
        f"{MEMBERSHIP}timers.py",
        "deadline=stop.deadline + away, next_at=next_at",
        "next_at=next_at",
        f"{RESUME_AFTER_REPLAY}stopping_keeps_its_deadline",
    ),
    Mutant(
        "a viewer sends what only a node may",
        f"{MEMBERSHIP}transitions.py",
        'hello.role == "view" and not isinstance(message, _VIEWER_MESSAGES)',
        "False",
        f"{GATHERING}a_viewer_only_looks",
    ),
    Mutant(
        "a rank of another node ends here",
        f"{MEMBERSHIP}transitions.py",
        "isinstance(message, (WorkerExit, Hung)) and message.rank not in member.ranks",
        "False",
        f"{GATHERING}an_illegal_event_raises_and_changes_nothing",
    ),
    Mutant(
        "messages of a later generation are taken",
        f"{MEMBERSHIP}transitions.py",
        "if message.generation > generation:",
        "if False:",
        f"{GATHERING}an_illegal_event_raises_and_changes_nothing",
    ),
    Mutant(
        "a worker ends twice",
        f"{MEMBERSHIP}worker_reports.py",
        "    if message.rank in member.exit_codes:\n        return\n    member.exit",
        "    member.exit",
        f"{REPEATS}an_exit_that_is_repeated_counts_once",
    ),
    Mutant(
        "a hang is forgotten when another worker dies",
        f"{MEMBERSHIP}worker_reports.py",
        (
            "        # The hang was first, so it must be judged before this exit.\n      "
            "  conclude_hang(job, generation.hang, now)"
        ),
        "        pass",
        f"{HANG_REPORT}the_hang_stays_the_first_cause_when_a_worker_dies_meanwhile",
    ),
)
