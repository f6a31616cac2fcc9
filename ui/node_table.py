"""
The nodes of a replayed event log.

Some events change the state of all nodes. They change groups of nodes that are in one state, not
the nodes. Thus the time of a replay is linear in the size of the log, for any number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdrun.ui.job_status import NodeStatus


class NodeGroup:
    """
    Nodes in one state that all have a part in the generation, or none.

    A group that gets into the state of another one points to it (a union-find structure).
    """

    __slots__ = ("merged_into", "state")

    def __init__(self, state: str) -> None:
        self.state = state
        self.merged_into: NodeGroup | None = None

    def find_root(self) -> NodeGroup:
        """Return the group that contains this one now."""
        root = self
        while root.merged_into is not None:
            root = root.merged_into
        group = self
        while group.merged_into is not None:
            following = group.merged_into
            if following is not root:
                group.merged_into = root
            group = following
        return root


class NodeEntry:
    """A node of the replay."""

    __slots__ = ("group", "index", "workers")

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        self.index = -1
        self.workers = 0


class NodeTable:
    """All nodes of a job."""

    def __init__(self) -> None:
        self._entries: dict[str, NodeEntry] = {}
        self._groups: dict[tuple[str, bool], NodeGroup] = {}
        self._placed: list[NodeEntry] = []

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def is_placed(self, name: str) -> bool:
        """Return whether a node has a part in the generation; True if it is unknown."""
        entry = self._entries.get(name)
        return entry is None or entry.index >= 0

    def set_state(self, name: str, state: str, workers: int | None = None) -> None:
        """Change the state of a node, and the number of its workers if it is given."""
        entry = self._find_entry(name)
        entry.group = self._find_group(state, entry.index >= 0)
        if workers is not None:
            entry.workers = workers

    def place_nodes(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Give these nodes, and no others, a part in the generation: names and workers."""
        others: dict[NodeGroup, NodeGroup] = {}
        for entry in self._placed:
            entry.index = -1
            entry.group = others.get(entry.group) or self._add_counterpart(others, entry, False)
        self._placed = []
        placed: dict[NodeGroup, NodeGroup] = {}
        for index, (name, workers) in enumerate(nodes):
            entry = self._find_entry(name)
            entry.group = placed.get(entry.group) or self._add_counterpart(placed, entry, True)
            entry.index = index
            entry.workers = workers
            self._placed.append(entry)

    def _add_counterpart(
        self, known: dict[NodeGroup, NodeGroup], entry: NodeEntry, is_placed: bool
    ) -> NodeGroup:
        """Add the group that an entry changes to, for all entries of its group."""
        found = self._find_group(entry.group.find_root().state, is_placed)
        known[entry.group] = found
        return found

    def change_placed(self, state: str) -> None:
        """Change the state of every node with a part in the generation."""
        for old, is_placed in list(self._groups):
            if is_placed:
                self._merge_groups(old, state, True)

    def change_state(self, old: str, placed: str, others: str) -> None:
        """Change all nodes in a state: to ``placed`` with a part in the generation."""
        self._merge_groups(old, placed, True)
        self._merge_groups(old, others, False)

    def snapshot(self) -> dict[str, NodeStatus]:
        """Return all nodes: those of the generation by rank, then the others by name."""
        entries = sorted(
            self._entries.items(), key=lambda item: (item[1].index < 0, item[1].index, item[0])
        )
        return {
            name: NodeStatus(name, entry.group.find_root().state, entry.index, entry.workers)
            for name, entry in entries
        }

    def _find_entry(self, name: str) -> NodeEntry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = NodeEntry(self._find_group("joined", False))
        return entry

    def _find_group(self, state: str, is_placed: bool) -> NodeGroup:
        group = self._groups.get((state, is_placed))
        if group is None:
            group = self._groups[state, is_placed] = NodeGroup(state)
        return group

    def _merge_groups(self, old: str, new: str, is_placed: bool) -> None:
        if old == new or (old, is_placed) not in self._groups:
            return
        group = self._groups.pop((old, is_placed))
        target = self._groups.setdefault((new, is_placed), group)
        if target is group:
            group.state = new
        else:
            group.merged_into = target
