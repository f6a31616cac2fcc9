"""Connections: patience, stale messages, limits, keys, relay frames."""

from __future__ import annotations

from tests.mutants.model import Mutant

SCHEDULER = "rendezvous/scheduler/"
TRANSPORT = "rendezvous/transport/"
SOCKETS = "tests/rendezvous/scheduler/test_sockets.py::test_"
CUT_FRAMES = "tests/rendezvous/transport/test_cut_frames.py::test_"
LIMITS = "tests/rendezvous/transport/test_limits.py::test_"
PATIENCE = "tests/rendezvous/transport/test_patience.py::test_"
PENDING_HANDSHAKES = "tests/rendezvous/transport/test_pending_handshakes.py::test_"
RECONNECT = "tests/rendezvous/transport/test_reconnect.py::test_"
RELAY = "tests/rendezvous/scheduler/test_relay.py::test_"
RELAY_FRAMES = "tests/rendezvous/transport/test_relay_frames.py::test_"
RESEND = "tests/rendezvous/transport/test_resend.py::test_"
TIMEOUTS = "tests/rendezvous/transport/test_timeouts.py::test_"
ZAP = "tests/rendezvous/transport/test_zap.py::test_"


MUTANTS = (
    Mutant(
        "one refused handshake that is long past is another token",
        f"{TRANSPORT}reconnect.py",
        "(self._refusals > 1 and is_late)",
        "is_late",
        f"{RECONNECT}a_handshake_that_met_the_death_of_a_scheduler_is_no_other_token",
    ),
    Mutant(
        "a listener that was out of reach meanwhile is another program",
        f"{TRANSPORT}reconnect.py",
        "        self.on_handshake()\n",
        "        self._refusals = 0\n        self._first_refusal = None\n",
        f"{RECONNECT}a_listener_that_was_out_of_reach_meanwhile_is_not_taken_for_another_program",
    ),
    Mutant(
        "the stall of this process is the silence of a listener",
        f"{TRANSPORT}reconnect.py",
        "                self._silent_since += late\n",
        "                pass\n",
        f"{RECONNECT}the_stall_of_this_process_is_not_the_silence_of_a_listener",
    ),
    Mutant(
        "one refusal ends a standalone relay",
        f"{SCHEDULER}relay_main.py",
        "if refusals >= MAX_REFUSALS:",
        "if refusals:",
        f"{RELAY}one_refused_handshake_is_not_the_end_of_a_standalone_relay",
    ),
    Mutant(
        "a relay that is refused ends with a traceback",
        f"{SCHEDULER}relay_main.py",
        "except (RendezvousError, AuthenticationError) as error:",
        "except RendezvousError as error:",
        f"{RELAY}a_child_relay_that_is_refused_ends_with_a_line",
    ),
    Mutant(
        "a relay that stands still is left alone",
        f"{SCHEDULER}relay_processes.py",
        "is_frozen = relay.pings.is_frozen()",
        "pass",
        f"{RELAY}relays_that_stand_still_are_replaced_and_no_agent_is_lost",
    ),
    Mutant(
        "a stall of this process counts as silence",
        f"{TRANSPORT}reconnect.py",
        "            self._alive_at += late\n",
        "",
        f"{PATIENCE}the_own_sleep_is_no_silence_of_the_scheduler",
    ),
    Mutant(
        "a stall of this process uses up its patience",
        f"{TRANSPORT}reconnect.py",
        "                self._lost_since += late",
        "                pass",
        f"{PATIENCE}the_own_sleep_uses_up_no_patience",
    ),
    Mutant(
        "old messages renew the lease",
        f"{TRANSPORT}reconnect.py",
        "        if is_certain:\n",
        "        if True:\n",
        f"{RECONNECT}what_lay_there_for_longer_than_the_lease_is_stale",
    ),
    Mutant(
        "a process that has just woken is cut off at once",
        f"{TRANSPORT}reconnect.py",
        (
            "if now - self._last_turn_at > STALL_SECONDS or now - self._stall_ended_at < "
            "RECHECK_SECONDS:"
        ),
        "if False:",
        f"{RECONNECT}who_has_just_woken_is_given_a_moment_to_ask_and_no_more",
    ),
    Mutant(
        "orders older than the lease are obeyed",
        f"{TRANSPORT}reconnect.py",
        "return bool(lease) and now - self._certain_at > lease",
        "return False",
        f"{RECONNECT}what_lay_there_for_longer_than_the_lease_is_stale",
    ),
    Mutant(
        "a wrong token is waited for",
        f"{TRANSPORT}reconnect.py",
        "self._refusals >= MAX_REFUSALS",
        "False",
        f"{PATIENCE}some_quick_refusals_are_a_wrong_token",
    ),
    Mutant(
        "a silent listener is waited for",
        f"{TRANSPORT}reconnect.py",
        "if self._silent_since and now - self._silent_since > self._max_silence:",
        "if False:",
        f"{PATIENCE}a_listener_that_says_nothing_is_no_scheduler",
    ),
    Mutant(
        "a lost scheduler is waited for without end",
        f"{TRANSPORT}reconnect.py",
        "if gone > max(welcome.patience, self._min_patience):",
        "if False:",
        f"{PATIENCE}the_own_sleep_uses_up_no_patience",
    ),
    Mutant(
        "a scheduler that never comes is waited for",
        f"{TRANSPORT}reconnect.py",
        (
            "        if now - self._began_at > self._start_timeout:\n            raise "
            "RendezvousError(\n                fault"
        ),
        "        if False:\n            raise RendezvousError(\n                fault",
        f"{PATIENCE}a_scheduler_that_never_comes_is_waited_for_until_the_start_timeout",
    ),
    Mutant(
        "messages that may be stale are passed on",
        f"{TRANSPORT}resend.py",
        ("elif self.stale_guard.is_active and not isinstance(message, Welcome | Refuse):"),
        "elif False:",
        f"{RESEND}what_may_be_stale_is_held_until_a_new_heartbeat_is_answered",
    ),
    Mutant(
        "an old answer ends the doubt",
        f"{TRANSPORT}resend.py",
        "if not self.is_active or echo_number < self._beat_number:",
        "if not self.is_active:",
        f"{RESEND}what_may_be_stale_is_held_until_a_new_heartbeat_is_answered",
    ),
    Mutant(
        "a scheduler of another run is taken",
        f"{TRANSPORT}resend.py",
        '(known.run != message.run or known.job not in ("", message.job))',
        "False",
        f"{RESEND}a_scheduler_of_another_run_ends_the_conversation",
    ),
    Mutant(
        "a repeated order is carried out twice",
        f"{TRANSPORT}resend.py",
        "        return message != before\n",
        "        return True\n",
        f"{RESEND}what_the_scheduler_repeats_is_no_news",
    ),
    Mutant(
        "messages of an old generation are repeated",
        f"{TRANSPORT}resend.py",
        'if getattr(message, "generation", generation) >= generation',
        "",
        f"{RESEND}messages_of_an_older_generation_are_not_repeated",
    ),
    Mutant(
        "an item that was cut is read",
        f"{TRANSPORT}relay_frames.py",
        "        if at > len(frame):\n",
        "        if False:\n",
        f"{CUT_FRAMES}each_cut_inside_an_item_is_refused",
    ),
    Mutant(
        "an agent that was closed is heard",
        f"{TRANSPORT}relay_table.py",
        "case AgentFrame(number) if number in closed:",
        "case AgentFrame(number) if False:",
        f"{RELAY_FRAMES}a_word_that_is_none_ends_that_agent_only",
    ),
    Mutant(
        "an invalid message ends the relay",
        f"{TRANSPORT}relay_table.py",
        "        except CodecError as error:\n            agents.add(peer)",
        "        except ZeroDivisionError as error:\n            agents.add(peer)",
        f"{RELAY_FRAMES}a_word_that_is_none_ends_that_agent_only",
    ),
    Mutant(
        "the end of a relay is not the end of its agents",
        f"{TRANSPORT}relay_table.py",
        ("*(PeerGone(agent, between=True) for agent in sorted(self._agents.pop(peer, ()))),"),
        "",
        f"{RELAY_FRAMES}the_end_of_a_relay_is_the_end_of_all_its_agents",
    ),
    Mutant(
        "the end of a relay blames its agents",
        f"{TRANSPORT}relay_table.py",
        "PeerGone(agent, between=True)",
        "PeerGone(agent)",
        f"{RELAY_FRAMES}the_end_of_a_relay_is_the_end_of_all_its_agents",
    ),
    Mutant(
        "the token bucket is off",
        f"{TRANSPORT}zmq_router.py",
        "return self.tokens >= 0",
        "return True",
        f"{LIMITS}a_connection_may_send_a_burst_and_then_its_rate",
    ),
    Mutant(
        "a burst saves up without limit",
        f"{TRANSPORT}zmq_router.py",
        "min(BURST_MESSAGES, self.tokens + refill)",
        "self.tokens + refill",
        f"{LIMITS}a_long_rest_saves_up_one_burst",
    ),
    Mutant(
        "the rate of a connection is not asked",
        f"{TRANSPORT}zmq_server.py",
        'connection.role != "relay" and not connection.take_token(now)',
        "False",
        f"{LIMITS}who_sends_too_much_is_cut_off_for_it",
    ),
    Mutant(
        "a scheduler reads messages of any length",
        f"{TRANSPORT}zmq_router.py",
        "            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),\n",
        "",
        f"{LIMITS}a_scheduler_refuses_a_frame_that_is_too_long_before_it_has_come",
    ),
    Mutant(
        "an agent reads messages of any length",
        f"{TRANSPORT}zmq_connection.py",
        "            (zmq.MAXMSGSIZE, Envelope.LIMIT),\n",
        "",
        f"{LIMITS}an_agent_refuses_a_frame_that_is_too_long_before_it_has_come",
    ),
    Mutant(
        "a relay reads messages of any length",
        f"{SCHEDULER}relay.py",
        "            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),\n",
        "",
        f"{LIMITS}a_relay_refuses_a_frame_that_is_too_long_before_it_has_come",
    ),
    Mutant(
        "a message may have further frames",
        f"{TRANSPORT}zmq_server.py",
        "            if extra:\n",
        "            if False:\n",
        f"{LIMITS}a_message_has_one_frame",
    ),
    Mutant(
        "another connection is shut down",
        f"{TRANSPORT}listen.py",
        "if not inode or socket_inode(fd) != inode:",
        "if False:",
        f"{LIMITS}only_the_own_connection_is_shut_down",
    ),
    Mutant(
        "connections of one address that say nothing take all descriptors",
        f"{TRANSPORT}listen.py",
        "        if len(here) > self._limit:\n",
        "        if False:\n",
        f"{PENDING_HANDSHAKES}the_oldest_of_an_address_makes_room",
    ),
    Mutant(
        "who has spoken counts as one that says nothing",
        f"{TRANSPORT}listen.py",
        "        self.remove_connection(fd)\n        self._proven[fd] = inode",
        "        pass",
        f"{PENDING_HANDSHAKES}who_has_spoken_does_not_count",
    ),
    Mutant(
        "connections of many addresses that say nothing take all descriptors",
        f"{TRANSPORT}listen.py",
        "        elif len(self._hosts) > self._total_limit:\n",
        "        elif False:\n",
        f"{PENDING_HANDSHAKES}many_addresses_take_half_of_the_descriptors",
    ),
    Mutant(
        "a key proves no role",
        f"{TRANSPORT}zmq_router.py",
        'str(frame.get("User-Id")) if self.authenticator else ""',
        '""',
        f"{SOCKETS}the_key_decides_the_role_not_the_word",
    ),
    Mutant(
        "any key is let in",
        f"{TRANSPORT}zap.py",
        '[b"200", b"OK", role.encode(), b""] if role else',
        '[b"200", b"OK", b"agent", b""] if True else',
        f"{ZAP}replaced_after_every_question_it_lets_the_same_in",
    ),
    Mutant(
        "without a handler everybody is let in",
        f"{TRANSPORT}zap.py",
        "        socket.setsockopt(self._zmq.ZAP_ENFORCE_DOMAIN, 1)",
        "        pass",
        f"{ZAP}without_its_handler_nobody_is_let_in",
    ),
    Mutant(
        "all interfaces are listened on",
        f"{TRANSPORT}listen.py",
        "if ip.is_unspecified:",
        "if False:",
        f"{SOCKETS}all_interfaces_are_refused",
    ),
    Mutant(
        "a crowd has the handshake time of a few",
        f"{TRANSPORT}timeouts.py",
        "HANDSHAKE_SECONDS + crowd / HANDSHAKES_PER_SECOND",
        "HANDSHAKE_SECONDS",
        f"{TIMEOUTS}limits",
    ),
    Mutant(
        "a message out of order is taken by an agent",
        f"{TRANSPORT}zmq_connection.py",
        "if envelope.sequence != expected:",
        "if False:",
        f"{LIMITS}an_agent_takes_messages_in_their_order_only",
    ),
)
