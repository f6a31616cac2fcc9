"""Several agents: ssh, frames, payloads, the end of a job."""

from __future__ import annotations

from tests.mutants.model import Mutant

ADAPTERS = "launcher/adapters/"
CONTROLLER = "launcher/controller/"
TEST_CONTROLLER = "tests/launcher/controller/test_controller.py::test_"
CUT_FRAMES = "tests/launcher/controller/test_cut_frames.py::test_"
PAYLOAD_LIMITS = "tests/launcher/controller/test_payload_limits.py::test_"
REMOTE_PAYLOADS = "tests/launcher/controller/test_remote_payloads.py::test_"
WHOLE_LINES = "tests/launcher/controller/test_whole_lines.py::test_"


MUTANTS = (
    Mutant(
        "ssh without --",
        f"{ADAPTERS}ssh_command.py",
        'return (*argv, "--", host.name, command)',
        "return (*argv, host.name, command)",
        f"{REMOTE_PAYLOADS}the_command_of_a_connection",
    ),
    Mutant(
        "a host is an option of ssh",
        f"{ADAPTERS}ssh_command.py",
        '        if word.startswith("-"):\n            raise',
        "        if False:\n            raise",
        f"{REMOTE_PAYLOADS}nothing_that_ssh_takes_for_an_option",
    ),
    Mutant(
        "ssh asks for a password",
        f"{ADAPTERS}ssh_command.py",
        '    "BatchMode=yes",\n',
        "",
        f"{REMOTE_PAYLOADS}the_command_of_a_connection",
    ),
    Mutant(
        "an interpreter is read by the shell",
        f"{ADAPTERS}ssh_command.py",
        "_SAFE_PATH.fullmatch(python)",
        "_SAFE_PATH.match(python)",
        f"{REMOTE_PAYLOADS}an_interpreter_that_a_shell_could_read_otherwise_is_refused",
    ),
    Mutant(
        "an interpreter is an option",
        f"{ADAPTERS}ssh_command.py",
        'python.startswith("-") or not',
        "not",
        f"{REMOTE_PAYLOADS}an_interpreter_that_a_shell_could_read_otherwise_is_refused",
    ),
    Mutant(
        "the user's options of ssh come last",
        f"{ADAPTERS}ssh_command.py",
        (
            "    argv = [program, *options]\n    for option in SSH_OPTIONS:\n        "
            'argv += ["-o", option]\n'
        ),
        (
            "    argv = [program]\n    for option in SSH_OPTIONS:\n        argv += "
            '["-o", option]\n    argv += options\n'
        ),
        f"{REMOTE_PAYLOADS}the_command_of_a_connection",
    ),
    Mutant(
        "-- among the options of ssh",
        f"{ADAPTERS}ssh_command.py",
        '    if "--" in found:',
        "    if False:",
        f"{REMOTE_PAYLOADS}options_of_ssh_that_are_none",
    ),
    Mutant(
        "a connection without a greeting is read without end",
        f"{CONTROLLER}frames.py",
        "            if len(self._data) > MAX_NOISE_BYTES:",
        "            if False:",
        f"{REMOTE_PAYLOADS}other_programs_on_the_connection_are_refused",
    ),
    Mutant(
        "a frame of any length is waited for",
        f"{CONTROLLER}frames.py",
        "            if size > MAX_FRAME_BYTES:",
        "            if False:",
        f"{REMOTE_PAYLOADS}other_programs_on_the_connection_are_refused",
    ),
    Mutant(
        "half a frame is taken",
        f"{CONTROLLER}frames.py",
        "            if len(self._data) < end:\n                return\n",
        "",
        f"{CUT_FRAMES}a_frame_that_comes_byte_by_byte_is_taken_once",
    ),
    Mutant(
        "all hosts are connected to at the same time",
        f"{CONTROLLER}host_connector.py",
        "due[: max(0, self.max_parallel - len(active))]",
        "due",
        f"{REMOTE_PAYLOADS}not_more_connections_at_once_than_the_window",
    ),
    Mutant(
        "a payload of any length is sent",
        f"{CONTROLLER}payload.py",
        "    if len(text) > MAX_TEXT_CHARACTERS:",
        "    if False:",
        f"{REMOTE_PAYLOADS}a_payload_that_is_too_long_is_refused_before_anything_starts",
    ),
    Mutant(
        "a payload unpacks to any length",
        f"{CONTROLLER}payload.py",
        ("inflater.decompress(base64.b64decode(text, validate=True), MAX_DECODED_BYTES)"),
        "inflater.decompress(base64.b64decode(text, validate=True))",
        f"{PAYLOAD_LIMITS}a_payload_that_unpacks_to_more_than_its_limit_is_refused",
    ),
    Mutant(
        "an agent that was killed is not waited for",
        f"{CONTROLLER}exit_policy.py",
        "wait = AFTER_KILL_SECONDS + self._grace if is_killed else AFTER_EXIT_SECONDS",
        "wait = AFTER_EXIT_SECONDS",
        f"{TEST_CONTROLLER}the_timer_waits_longer_when_an_agent_was_killed",
    ),
    Mutant(
        "agents that stay are never killed",
        f"{CONTROLLER}exit_policy.py",
        'self._steps = [(term, "term"), (close, "close"), (kill, "kill")]',
        'self._steps = [(term, "term"), (close, "close")]',
        f"{TEST_CONTROLLER}the_timer_waits_longer_when_an_agent_was_killed",
    ),
    Mutant(
        "the first agent's code is the job's",
        f"{CONTROLLER}exit_policy.py",
        "code = next((code for _, code in verdicts if code), 0)",
        "code = verdicts[0][1]",
        f"{TEST_CONTROLLER}job_exit_code",
    ),
    Mutant(
        "an agent that was stopped gives a verdict",
        f"{CONTROLLER}exit_policy.py",
        "if node not in stopped_nodes]\n    verdicts",
        "]\n    verdicts",
        f"{TEST_CONTROLLER}job_exit_code",
    ),
    Mutant(
        "the head node's code does not count",
        f"{CONTROLLER}exit_policy.py",
        '                return code, ""\n    unstopped',
        "                break\n    unstopped",
        f"{TEST_CONTROLLER}the_exit_code_of_a_job_that_can_restart_is_that_of_its_head_node",
    ),
    Mutant(
        "the user's stop does not win",
        f"{CONTROLLER}exit_policy.py",
        '            if code in signal_codes:\n                return code, ""',
        "            pass",
        f"{TEST_CONTROLLER}the_users_stop_wins_over_what_follows_from_it",
    ),
    Mutant(
        "a third stop is not heard",
        f"{CONTROLLER}exit_policy.py",
        'self._steps = [(now, "close"), (now + AFTER_CLOSE_SECONDS, "kill")]',
        "pass",
        f"{TEST_CONTROLLER}the_third_stop_signal_cuts_the_lifelines",
    ),
    Mutant(
        "a stop of the job means one node",
        f"{CONTROLLER}agent_handle.py",
        "self._lifeline.send(Lifeline.FOR_ALL, socket.MSG_DONTWAIT)",
        "pass",
        f"{TEST_CONTROLLER}agents_learn_that_a_stop_is_for_the_whole_job",
    ),
    Mutant(
        "a secret shows in a message",
        f"{CONTROLLER}agent_handle.py",
        'return f"AgentStart(node={self.node!r}, pass_fds={self.pass_fds})"',
        'return f"AgentStart(node={self.node!r}, payload={self.payload!r})"',
        f"{TEST_CONTROLLER}the_payload_of_each_agent",
    ),
    Mutant(
        "half a line is merged",
        f"{CONTROLLER}agent_handle.py",
        '            end = pending.rfind(b"\\n") + 1',
        "            end = len(pending)",
        f"{WHOLE_LINES}half_a_line_waits_for_its_other_half",
    ),
    Mutant(
        "a line without end stays in memory",
        f"{CONTROLLER}agent_handle.py",
        "if not data or len(pending) > MAX_PARTIAL_LINE_BYTES:",
        "if not data:",
        f"{WHOLE_LINES}a_line_without_end_does_not_stay_in_memory",
    ),
    Mutant(
        "the last line of an agent is lost",
        f"{CONTROLLER}agent_handle.py",
        "if not data or len(pending) > MAX_PARTIAL_LINE_BYTES:",
        "if len(pending) > MAX_PARTIAL_LINE_BYTES:",
        f"{WHOLE_LINES}the_last_line_needs_no_end",
    ),
)
