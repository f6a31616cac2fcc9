"""Parameter servers: pushes that count once, steps that end, and memory that is shared."""

from __future__ import annotations

from tests.mutants.model import Mutant

STORE = "parallel/servers/tables/store.py"
SESSION = "parallel/servers/session.py"
STORE_TESTS = "tests/parallel/servers/test_store.py::test_"
STEPS = "tests/parallel/servers/test_steps.py::test_"
ONCE = f"{STORE_TESTS}pieces_of_one_request_count_once_beside_their_repetition"

MUTANTS = (
    Mutant(
        "a repeated piece of a step counts twice",
        STORE,
        "                if self._claim_request(one.worker, client, each):\n"
        "                    others.append(one)",
        "                if self._claim_request(one.worker, client, each) or True:\n"
        "                    others.append(one)",
        f"{ONCE}[2-sync]",
    ),
    Mutant(
        "a repeated piece is used twice",
        STORE,
        "                if self._claim_request(one.worker, client, each):\n"
        "                    dense.update_piece",
        "                if self._claim_request(one.worker, client, each) or True:\n"
        "                    dense.update_piece",
        f"{ONCE}[2-async]",
    ),
    Mutant(
        "a request that is repeated is new",
        STORE,
        "            if request <= state.last_request:\n                return False",
        "            if False:\n                return False",
        f"{ONCE}[2-async]",
    ),
    Mutant(
        "a request of several pieces claims only the last one",
        STORE,
        "        for each, one in enumerate(given, request - len(given) + 1):\n"
        "            check_gradient",
        "        for each, one in enumerate(given, request):\n            check_gradient",
        f"{ONCE}[2-async]",
    ),
    Mutant(
        "a step ends although a push of it was refused",
        SESSION,
        "            if 0 < frame.place <= self._refused:",
        "            if False:",
        f"{STEPS}a_gradient_that_a_server_refuses_does_not_end_the_step",
    ),
    Mutant(
        "gradients of a late step stay in the mailbox",
        SESSION,
        "            store.copy_gradients(self._worker)\n            raise",
        "            raise",
        f"{STEPS}a_step_that_ends_too_late_has_the_gradients_as_they_were_pushed",
    ),
    Mutant(
        "a table has a part of a step whose other part is refused",
        "parallel/servers/client.py",
        "            if len(gradients) * len(self._links) > 1:",
        "            if False:",
        f"{STEPS}a_refused_gradient_leaves_the_step_as_it_was[1-1]",
    ),
    Mutant(
        "what a step needs is not copied from the mailbox",
        SESSION,
        '        return store.mode.name == "sync" and not self._channel.has_clock_ahead()',
        "        return False",
        f"{STEPS}more_gradients_than_the_mailbox_has_room_for[sync]",
    ),
)
