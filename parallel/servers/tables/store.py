"""
The tables of one server, and the requests on them; thread-safe, without sockets.

A push in sync mode is kept until every worker has ended the step. Then the gradients are added in
the order of micro-batch and rank, divided once, and used: the arithmetic of data parallel training.
In the other modes a push is used when it arrives.

A request that changes something has a number, which grows for each worker. One that is repeated
after a lost connection is not used again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.errors import ConfigError, DeadlineExceeded, UsageError
from pdrun.parallel.servers.settings import MAX_TABLES, Mode, TableSpec
from pdrun.parallel.servers.sharding import count_pieces
from pdrun.parallel.servers.tables.clocks import StepClocks
from pdrun.parallel.servers.tables.gradients import (
    Contribution,
    check_gradient,
    divide_gradient,
    sum_pieces,
    sum_rows,
)
from pdrun.parallel.servers.tables.tables import (
    DenseTable,
    RowTable,
    make_row_table,
    pieces_of_server,
)

REPLACED_TEXT = "another process has taken the place of worker {}"


@dataclass
class _StoredTable:
    """A table with its lock."""

    spec: TableSpec
    rows: RowTable | None = None
    dense: DenseTable | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True
    """Whether its first values are here."""

    def open(self) -> None:
        """The first values are here."""
        self.is_open = True
        if self.rows is not None:
            self.rows.publish()


@dataclass(frozen=True)
class ChangedRows:
    """The answer to a cache's question."""

    places: torch.Tensor
    """Of the ids whose rows have changed."""
    rows: torch.Tensor
    version: int
    """Of the table."""


@dataclass
class _WorkerState:
    """What a server knows of a worker."""

    client: str = ""
    """Random name of its process."""
    last_request: int = 0


class TableStore:
    """
    The tables of one server.

    Args:
        server, servers: number of this server, and of all.
        workers: number of workers of the job.
        seconds: limit of every wait.
        shares: whether workers of this host may read the tables' memory.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        server: int = 0,
        servers: int = 1,
        workers: int = 1,
        seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        shares: bool = False,
    ) -> None:
        self.mode = mode
        self._shares = shares
        self.server = server
        self.servers = servers
        self._workers = workers
        self.seconds = seconds
        self._clock = clock
        self._clocks = StepClocks(mode, workers)
        self._changed = threading.Condition()
        self._claims = threading.Lock()
        """Taken last: after the condition, and after a table's lock."""
        self._tables: list[_StoredTable] = []
        self._numbers: dict[str, int] = {}
        self._states: dict[int, _WorkerState] = defaultdict(_WorkerState)
        self._waiting: dict[int, dict[int, list[Contribution]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """sync: step -> table -> gradients."""
        self.updates = 0
        """Requests so far that have changed something."""

    # ---- workers ------------------------------------------------------------

    def join_worker(self, worker: int, client: str, step: int = -1) -> int:
        """
        Start or continue with a worker's process; return the number of its last request.

        Args:
            step: the last one that it has ended.

        Raises:
            UsageError: there is no such worker.
        """
        if not 0 <= worker < self._workers:
            raise UsageError(f"there are workers 0 to {self._workers - 1}, got {worker}")
        with self._changed:
            with self._claims:
                state = self._states[worker]
                if state.client != client:
                    self._states[worker] = state = _WorkerState(client)
            self._clocks.join_worker(worker, step)
            return state.last_request

    def export_requests(self) -> dict[str, tuple[str, int]]:
        """Return, by worker, the name of its process and its last request."""
        return {str(n): (state.client, state.last_request) for n, state in self._states.items()}

    def resume_requests(self, requests: dict[str, Any], updates: int) -> None:
        """Continue where another process of this server had written its tables."""
        with self._changed:
            self.updates = updates
            self._clocks.forget_workers()
            for worker, (client, last_request) in requests.items():
                self._states[int(worker)] = _WorkerState(str(client), int(last_request))

    def leave_worker(self, worker: int, client: str) -> None:
        """A worker's connection has ended: only in sync mode others still wait for it."""
        with self._changed:
            if self.mode.name != "sync" and self._states[worker].client == client:
                self._clocks.remove_worker(worker)
            self._changed.notify_all()

    def _claim_request(self, worker: int, client: str, request: int) -> bool:
        """Return whether a request is new; the caller has the lock of what it changes."""
        with self._claims:
            state = self._states[worker]
            if state.client != client:
                raise UsageError(REPLACED_TEXT.format(worker))
            if request <= state.last_request:
                return False
            state.last_request = request
            self.updates += 1
            return True

    # ---- tables -------------------------------------------------------------

    def declare_table(self, spec: TableSpec) -> int:
        """
        Make a table, or return the number of an equal one.

        Raises:
            ConfigError: it exists with other settings.
        """
        with self._changed:
            number = self._numbers.get(spec.name)
            if number is not None:
                known = self._tables[number].spec
                if difference := known.describe_difference(spec):
                    what = f"two workers describe it differently: {difference}"
                    raise ConfigError(what, where=f"served table {spec.name}")
                return number
            if len(self._tables) >= MAX_TABLES:
                raise UsageError(f"a server has at most {MAX_TABLES} tables")
            made = _StoredTable(spec, is_open=not spec.is_assigned)
            if spec.kind == "rows":
                made.rows = make_row_table(spec, self.servers, shares=self._shares)
            else:
                pieces = pieces_of_server(spec, count_pieces(spec.size), self.server, self.servers)
                made.dense = DenseTable(spec, pieces, shares=self._shares)
            self._tables.append(made)
            self._numbers[spec.name] = len(self._tables) - 1
            return len(self._tables) - 1

    def open_table(self, number: int) -> None:
        """The first values are here: let the other requests continue."""
        table = self._find_table(number)
        with self._changed:
            table.open()
            self._changed.notify_all()

    def _find_table(self, number: int) -> _StoredTable:
        if not 0 <= number < len(self._tables):
            raise UsageError(f"there is no table {number}")
        return self._tables[number]

    def _row_table(self, number: int, *, opened: bool = True) -> tuple[_StoredTable, RowTable]:
        table = self._find_table(number)
        if table.rows is None:
            raise UsageError(f"table {table.spec.name} is dense and has no rows")
        if opened and not table.is_open:
            self._wait_open(table)
        return table, table.rows

    def _dense_table(self, number: int, *, opened: bool = True) -> tuple[_StoredTable, DenseTable]:
        table = self._find_table(number)
        if table.dense is None:
            raise UsageError(f"table {table.spec.name} is served by rows")
        if opened and not table.is_open:
            self._wait_open(table)
        return table, table.dense

    def _wait_open(self, table: _StoredTable) -> None:
        with self._changed:
            if not self._wait_until(lambda: table.is_open):
                what = f"the first values of table {table.spec.name} did not arrive from worker 0 "
                raise DeadlineExceeded(what + f"within {self.seconds:g} s")

    def find_dim(self, number: int) -> int:
        """Return the elements of a row of a table."""
        return self._find_table(number).spec.dim

    def find_memory(self, number: int) -> int:
        """Return the descriptor of a table's memory, which workers may read; -1: none."""
        table = self._find_table(number)
        if table.dense is not None:
            return table.dense.shared.fd if table.dense.shared is not None else -1
        if table.rows is not None and table.rows.shared is not None:
            return table.rows.shared.memory.fd
        return -1

    # ---- reads --------------------------------------------------------------

    def read_rows(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """
        Return the rows of ids, in any order.

        Raises:
            UsageError: an id is out of range.
        """
        table, rows = self._row_table(number)
        with table.lock:
            try:
                return rows.read_rows(ids)
            except (IndexError, RuntimeError):  # torch found an id that is out of range
                rows.check_ids(ids, sorted_ids=False)
                raise

    def read_changed(self, number: int, ids: torch.Tensor, since: torch.Tensor) -> ChangedRows:
        """
        Return the rows of ids that have changed since a version; for a worker's cache.

        Raises:
            UsageError: an id is out of range.
        """
        table, rows = self._row_table(number)
        rows.check_ids(ids, sorted_ids=False)
        with table.lock:
            return ChangedRows(*rows.read_changed(ids, since), rows.version)

    def read_piece(self, number: int, piece: int) -> torch.Tensor:
        """
        Return the values of a piece of a dense weight: the memory of the table, not a copy.

        In sync mode nothing changes before the worker that reads ends its step. In the other modes
        a part of the piece may be newer than the rest, as may one piece be than another.
        """
        table, dense = self._dense_table(number)
        with table.lock:
            dense.check_piece(piece)
            return dense.read_piece(piece)

    def list_pieces(self, number: int, first: int, count: int) -> list[tuple[int, int]]:
        """
        Return (piece, elements) of some pieces of a dense weight, in this server's order.

        Raises:
            UsageError: this server does not have them.
        """
        _, dense = self._dense_table(number)
        return dense.list_pieces(first, count)

    # ---- pushes -------------------------------------------------------------

    def push_rows(
        self,
        number: int,
        ids: torch.Tensor,
        grads: torch.Tensor,
        *,
        worker: int = 0,
        client: str = "",
        request: int,
        step: int = 0,
        part: int = 0,
        divisor: float = 1.0,
    ) -> None:
        """
        Use, or keep until the step ends, the gradients of rows; they may be changed.

        Raises:
            UsageError: ids or gradients are refused. The table is unchanged.
        """
        table, rows = self._row_table(number)
        rows.check_ids(ids, sorted_ids=True)
        check_gradient(table.spec.name, grads, divisor)
        if self.mode.name == "sync":
            given = Contribution(part, worker, divisor, 0, ids, grads)
            self._keep_push(number, [given], client, request, step)
            return
        with table.lock:
            if self._claim_request(worker, client, request):
                rows.update_rows(ids, divide_gradient(grads, divisor))

    def push_piece(
        self,
        number: int,
        piece: int,
        grad: torch.Tensor,
        *,
        worker: int = 0,
        client: str = "",
        request: int,
        step: int = 0,
        part: int = 0,
        divisor: float = 1.0,
    ) -> None:
        """Use, or keep, the gradient of a piece of a dense weight; see `push_rows`."""
        given = Contribution(part, worker, divisor, piece, None, grad)
        self._push_pieces(number, [given], client, request, step)

    def push_pieces(
        self,
        number: int,
        grads: Mapping[int, torch.Tensor],
        *,
        worker: int = 0,
        client: str = "",
        request: int,
        step: int = 0,
        part: int = 0,
        divisor: float = 1.0,
    ) -> None:
        """
        Use, or keep, the gradients of some pieces by their numbers. Each is a request: the last one
        has the number ``request``.
        """
        given = [
            Contribution(part, worker, divisor, piece, None, grad) for piece, grad in grads.items()
        ]
        self._push_pieces(number, given, client, request, step)

    def _push_pieces(
        self, number: int, given: list[Contribution], client: str, request: int, step: int
    ) -> None:
        table, dense = self._dense_table(number)
        for one in given:
            dense.check_piece(one.place, len(one.values))
        if self.mode.name == "sync":
            for one in given:
                check_gradient(table.spec.name, one.values, one.divisor)
            self._keep_push(number, given, client, request, step)
            return
        # each piece is used while it is in the processor's cache
        for each, one in enumerate(given, request - len(given) + 1):
            check_gradient(table.spec.name, one.values, one.divisor)
            with table.lock:
                if self._claim_request(one.worker, client, each):
                    dense.update_piece(one.place, divide_gradient(one.values, one.divisor))

    def _keep_push(
        self, number: int, given: list[Contribution], client: str, request: int, step: int
    ) -> None:
        if not given:
            return
        first = given[0]
        with self._changed:
            if step <= self._clocks.used_step:
                if request <= self._states[first.worker].last_request:
                    return
                used = self._clocks.used_step
                raise UsageError(f"step {step} is over: the last step was {used}")
            others = self._waiting[step][number]
            if others and others[0].divisor != first.divisor:
                what = f"step {step}: gradients are divided by {first.divisor:g} on worker "
                what += f"{first.worker} and by {others[0].divisor:g} on {others[0].worker}"
                raise UsageError(what, where=f"table {self._tables[number].spec.name}")
            # a repetition in other frames may have been here first, with some of the pieces
            for each, one in enumerate(given, request - len(given) + 1):
                if self._claim_request(one.worker, client, each):
                    others.append(one)

    def end_step(self, step: int, *, worker: int = 0, client: str = "", request: int) -> int:
        """
        Note that a worker has pushed all of a step; wait for others as the mode demands.

        Returns:
            how many steps other workers have ended since this worker's last one.

        Raises:
            DeadlineExceeded: others did not end the step in time; names them.
        """
        with self._changed:
            passed = 0
            if self._claim_request(worker, client, request):
                passed = self._clocks.end_step(worker, step)
            if self.mode.name == "sync" and self._clocks.can_use(step):
                self._use_step(step)
            self._changed.notify_all()
            if not self._wait_until(lambda: not self._clocks.find_blocking(worker, step)):
                late = ", ".join(map(str, self._clocks.find_blocking(worker, step)[:16]))
                raise DeadlineExceeded(
                    f"step {step}: worker {late} did not end it within {self.seconds:g} s"
                )
            return passed

    def copy_gradients(self, worker: int) -> None:
        """Copy a worker's gradients that wait for the end of a step: their memory may change."""
        with self._changed:
            for tables in self._waiting.values():
                for given in [one for each in tables.values() for one in each]:
                    if given.worker == worker:
                        given.values = given.values.clone()

    def _use_step(self, step: int) -> None:
        """Add the gradients of a step in one order, divide and use them (sync)."""
        tables = self._waiting.pop(step, {})
        for number, contributions in sorted(tables.items()):
            table = self._tables[number]
            contributions.sort(key=lambda given: (given.part, given.worker))
            with table.lock:
                if table.rows is not None:
                    ids, total = sum_rows(contributions, table.rows.distinct)
                    table.rows.update_rows(ids, divide_gradient(total, contributions[0].divisor))
                elif table.dense is not None:
                    for piece, total in sum_pieces(contributions):
                        table.dense.update_piece(
                            piece, divide_gradient(total, contributions[0].divisor)
                        )
        self._clocks.used_step = step

    def _wait_until(self, is_done: Callable[[], bool]) -> bool:
        """Wait for a condition; return False after the limit. The caller has the condition."""
        deadline = self._clock() + self.seconds
        while not is_done():
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    # ---- values from outside ------------------------------------------------

    def assign_rows(self, number: int, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Store the first values of rows."""
        table, rows = self._row_table(number, opened=False)
        rows.check_ids(ids, sorted_ids=True)
        with table.lock:
            rows.assign_rows(ids, values)

    def assign_piece(self, number: int, piece: int, values: torch.Tensor) -> None:
        """Store the first values of a piece."""
        table, dense = self._dense_table(number, opened=False)
        dense.check_piece(piece, len(values))
        with table.lock:
            dense.assign_piece(piece, values)

    def describe_tables(self) -> dict[str, Any]:
        """Return counts, for logs and tests."""
        tables = {
            table.spec.name: {"rows": table.rows.count if table.rows else table.spec.size}
            for table in self._tables
        }
        return {"updates": self.updates, "used_step": self._clocks.used_step, "tables": tables}

    @contextmanager
    def paused(self) -> Iterator[list[_StoredTable]]:
        """Return a context manager in which no table changes; yields the tables."""
        with self._changed, ExitStack() as locks:
            for table in self._tables:
                locks.enter_context(table.lock)
            yield self._tables
