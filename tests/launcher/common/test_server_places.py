"""Where parameter servers are placed, and what they and the workers get."""

from __future__ import annotations

import pytest

from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import parse_servers
from pdrun.launcher.common.server_places import count_servers, servers_of_node
from pdrun.launcher.supervisor.events import SERVER_SLOT, server_of_slot, slot_of_server


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [
        ("3", 2, [[0, 1], [2]]),
        ("1", 3, [[0], [], []]),
        ("5", 3, [[0, 1], [2, 3], [4]]),
        ("2/node", 2, [[0, 1], [2, 3]]),
        ("", 2, [[], []]),
    ],
)
def test_servers_are_spread_over_the_nodes_in_order(text, nodes, expected):
    found = [list(servers_of_node(text, nodes, rank)) for rank in range(nodes)]
    assert found == expected
    assert count_servers(text, nodes) == sum(map(len, expected))


@pytest.mark.parametrize("text", ["2", "1/node", "1024"])
def test_numbers_of_servers(text):
    assert parse_servers(text, "--servers") == text


@pytest.mark.parametrize("text", ["0", "-1", "1025", "2/host", "x", "", "/node", "1.5", "0/node"])
def test_wrong_numbers_are_refused(text):
    with pytest.raises(UsageError, match=r"^--servers: "):
        parse_servers(text, "--servers")


def test_each_generation_has_its_own_slots():
    slots = {slot_of_server(generation, server) for generation in range(3) for server in (0, 1023)}
    assert len(slots) == 6
    assert max(slots) == SERVER_SLOT
    assert server_of_slot(slot_of_server(7, 5)) == 5
