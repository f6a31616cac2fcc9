"""The state machine: who is accepted, silent, cut off or lost."""

from __future__ import annotations

from tests.mutants.model import Mutant

MEMBERSHIP = "rendezvous/membership/"
ELASTIC_MEMBERSHIP = "tests/rendezvous/membership/test_elastic_membership.py::test_"
FAILURE_TO_VERDICT = "tests/rendezvous/membership/test_failure_to_verdict.py::test_"
GATHERING = "tests/rendezvous/membership/test_gathering.py::test_"
OLD_CONNECTIONS = "tests/rendezvous/membership/test_old_connections.py::test_"
RESUME_AFTER_REPLAY = "tests/rendezvous/membership/test_resume_after_replay.py::test_"
WORK_PER_EVENT = "tests/rendezvous/membership/test_work_per_event.py::test_"


MUTANTS = (
    Mutant(
        "a node lost while the workers are stopped is not named",
        f"{MEMBERSHIP}job.py",
        "            self.stop_notes.append(text)\n",
        "            pass\n",
        f"{FAILURE_TO_VERDICT}a_node_lost_while_the_workers_are_stopped_is_named_and_changes_no"
        "_code",
    ),
    Mutant(
        "a scheduler orphaned while workers are stopped forgets the cause",
        f"{MEMBERSHIP}generations.py",
        "if job.state is JobState.STOPPING and stop is not None:",
        "if False:",
        f"{FAILURE_TO_VERDICT}a_scheduler_orphaned_while_the_workers_are_stopped_keeps_the_cause",
    ),
    Mutant(
        "unanswered heartbeats are ignored",
        f"{MEMBERSHIP}failure_detector.py",
        "elif unanswered > limits.dead:",
        "elif False:",
        f"{OLD_CONNECTIONS}a_node_that_sends_and_receives_nothing_is_lost",
    ),
    Mutant(
        "a silent node is never lost",
        f"{MEMBERSHIP}failure_detector.py",
        "elif silent > limits.dead:",
        "elif False:",
        f"{FAILURE_TO_VERDICT}silence_is_suspect_then_lost",
    ),
    Mutant(
        "a cut node is never lost",
        f"{MEMBERSHIP}failure_detector.py",
        "if time >= member.lost_at:",
        "if False:",
        f"{ELASTIC_MEMBERSHIP}a_standby_node_that_goes_leaves_no_trace",
    ),
    Mutant(
        "the scheduler's own standstill counts as silence",
        f"{MEMBERSHIP}failure_detector.py",
        "self._stalled_seconds += late",
        "pass",
        (f"{FAILURE_TO_VERDICT}the_scheduler_does_not_take_its_own_sleep_for_the_nodes_silence"),
    ),
    Mutant(
        "an answer on its way counts as missing",
        f"{MEMBERSHIP}failure_detector.py",
        "max(0, beat.number - 1 - beat.echo)",
        "max(0, beat.number - beat.echo)",
        f"{FAILURE_TO_VERDICT}silence_is_suspect_then_lost",
    ),
    Mutant(
        "a cut right after a standstill proves an end",
        f"{MEMBERSHIP}failure_detector.py",
        "awake = now - self._stall_ended_at >= self.times.dead",
        "awake = True",
        (
            f"{FAILURE_TO_VERDICT}a_connection_that_is_closed_after_the_scheduler_stood_still"
            "_is_no_proof_of_an_end"
        ),
    ),
    Mutant(
        "the end of a relay proves the end of its nodes",
        f"{MEMBERSHIP}failure_detector.py",
        "talking = talking and not between",
        "pass",
        f"{OLD_CONNECTIONS}the_end_of_a_relay_tells_nothing_about_its_nodes",
    ),
    Mutant(
        "a successor gives nodes no time to reconnect",
        f"{MEMBERSHIP}failure_detector.py",
        "member.lost_at = member.alive_at + self.times.dead",
        "member.lost_at = member.alive_at",
        f"{RESUME_AFTER_REPLAY}gathering_goes_on_with_who_was_there",
    ),
    Mutant(
        "heartbeats of a large job are as frequent as of a small one",
        f"{MEMBERSHIP}failure_detector.py",
        "(config.nodes + config.spares) / MAX_NODES_AT_FULL_RATE",
        "0.0",
        f"{WORK_PER_EVENT}heartbeats_grow_rarer_with_the_size",
    ),
    Mutant(
        "an older connection of the same agent is taken",
        f"{MEMBERSHIP}admission.py",
        ("older is not None and roster.sessions[older].hello.incarnation >= hello.incarnation"),
        "False",
        f"{OLD_CONNECTIONS}an_older_connection_is_refused_before_the_agent_has_joined",
    ),
    Mutant(
        "an older connection is taken after the newer one was cut",
        f"{MEMBERSHIP}admission.py",
        "if member is not None and member.hello.incarnation >= hello.incarnation:",
        "if False:",
        f"{OLD_CONNECTIONS}an_older_connection_is_refused_after_the_newer_one_was_cut",
    ),
    Mutant(
        "a node that was given up comes back as if nothing had happened",
        f"{MEMBERSHIP}admission.py",
        "(reason := roster.gone.get(hello.agent)) is not None",
        "False and (reason := '')",
        f"{ELASTIC_MEMBERSHIP}a_fenced_node_comes_back_as_a_new_one",
    ),
    Mutant(
        "another version of the protocol is accepted",
        f"{MEMBERSHIP}admission.py",
        "if hello.version != PROTOCOL:",
        "if False:",
        f"{GATHERING}another_protocol_is_refused",
    ),
    Mutant(
        "another job is accepted",
        f"{MEMBERSHIP}admission.py",
        "if hello.job and job.key and hello.job != job.key:",
        "if False:",
        f"{GATHERING}another_job_is_refused_naming_both",
    ),
    Mutant(
        "a reconnected node is not told to stop",
        f"{MEMBERSHIP}admission.py",
        "if job.shutdown.stop and member.phase is Phase.RUNNING:",
        "if False:",
        f"{FAILURE_TO_VERDICT}a_node_back_on_a_new_connection_is_told_what_holds",
    ),
    Mutant(
        "a reconnected node is not sent the verdict",
        f"{MEMBERSHIP}admission.py",
        "        outbox.send(peer, job.shutdown.verdict)",
        "        pass",
        f"{FAILURE_TO_VERDICT}who_was_cut_at_the_end_can_come_back_for_the_verdict",
    ),
    Mutant(
        "a node joins a full job",
        f"{MEMBERSHIP}admission.py",
        "if refuse is None and is_full(job.config, job.roster):",
        "if False:",
        f"{ELASTIC_MEMBERSHIP}who_comes_late_stands_by_and_what_comes_then_is_refused",
    ),
    Mutant(
        "a loss is blamed for an earlier failure",
        f"{MEMBERSHIP}departures.py",
        "if job.generation.failures.has_own_before(member.cut_at):",
        "if False:",
        f"{ELASTIC_MEMBERSHIP}a_failure_before_the_loss_stays_the_cause",
    ),
    Mutant(
        "a restart is not counted when too few nodes are left",
        f"{MEMBERSHIP}departures.py",
        ("stop_workers(job, Trigger.CHANGED, reason, now, is_change=True, counts_as_restart=True)"),
        "stop_workers(job, Trigger.CHANGED, reason, now, is_change=True)",
        f"{ELASTIC_MEMBERSHIP}in_a_job_of_fixed_size_that_is_one_of_its_restarts",
    ),
)
