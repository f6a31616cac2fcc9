"""
`pdrun.servers.connect`: tables on parameter servers, for programs that push and pull themselves.

    client = pdrun.servers.connect(mode="async")
    client.add_rows("users", pdrun.rows("adagrad", lr=0.1), dim=32)
    rows = client.rows("users", ids)
    client.push_rows("users", ids, gradients)
    client.clock()                                  # this worker has ended a step

In a process without servers the tables are in its memory. All tensors are fp32 on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.servers.directory import ServerDirectory, find_directory
from pdrun.parallel.servers.frames import Op
from pdrun.parallel.servers.links.checked_values import (
    check_gradients,
    check_ids,
    move_to_host,
    sum_repeated,
    take_elements,
)
from pdrun.parallel.servers.links.declared_table import DeclaredTable
from pdrun.parallel.servers.links.in_process import TablesInProcess
from pdrun.parallel.servers.links.link import PushHeader, ServerLink
from pdrun.parallel.servers.links.remote import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.links.row_cache import CacheQuestions, RowCache
from pdrun.parallel.servers.settings import (
    MAX_DIM,
    MAX_NAME_CHARS,
    Mode,
    ServedWeights,
    TableSpec,
    parse_mode,
)
from pdrun.parallel.servers.tables.gradients import check_gradient

TIMEOUT_SECONDS = 600.0
RETURN_SECONDS = 60.0
"""Time in which a lost server is back; pdrun ends the job if it cannot come back."""
ASSIGNED_ROWS = 1 << 16
"""Rows of one frame of first values."""
DEFAULT_SCALE = 0.05
ASYNC = Mode("async")


@dataclass(frozen=True)
class StepGradient:
    """A gradient that `ServerClient.push_step` pushes."""

    table: str
    values: torch.Tensor
    ids: torch.Tensor | None = None
    """Of rows: sorted, unique, on the host."""
    part: int = 0
    """Number of the micro-batch."""


class ServerClient:
    """
    A worker's view of all servers. Not thread-safe.

    Args:
        links: one per server.
        worker: rank of this worker; rank 0 sends first values.
        mode: decides how long rows of a cache are used; a mode that waits less is safe, too.
    """

    def __init__(
        self,
        links: Sequence[ServerLink],
        worker: int,
        *,
        is_local: bool,
        mode: Mode = ASYNC,
    ) -> None:
        self._mode = mode
        self._links = list(links)
        self._worker = worker
        self.is_local = is_local
        """Whether the tables are in this process."""
        self._tables: dict[str, DeclaredTable] = {}
        self._questions = CacheQuestions(self._links)
        self.step = 0
        """Number of the step that the next `clock` ends."""

    @property
    def servers(self) -> int:
        """Number of servers; 1 if the tables are in this process."""
        return len(self._links)

    # ---- tables -------------------------------------------------------------

    def add_rows(
        self,
        name: str,
        served: ServedWeights,
        *,
        dim: int,
        size: int = 0,
        keep: int = 0,
        admit: int = 1,
        scale: float = DEFAULT_SCALE,
        seed: int = 0,
        values: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Add a table of rows. Every worker does so, with the same arguments.

        Args:
            dim: elements of a row.
            size: number of ids, from 0; 0: any 64-bit id.
            keep: most rows on all servers; those not updated for longest are dropped. 0: no limit.
            admit: a row is stored when its id has had this many gradients.
            scale: new rows are uniform in ``[-scale, scale]``, by seed, table and id.
            values: ``[size, dim]``: first values instead; those of rank 0 count.
            device: of the cache, and of the rows that `rows` returns if there is one.
        """
        where = f"served table {name}"
        if served.kind != "rows":
            raise UsageError("must be pdrun.rows()", where=where)
        for label, number, least, most in (
            ("dim", dim, 1, MAX_DIM),
            ("size", size, 0, 1 << 62),
            ("keep", keep, 0, 1 << 62),
            ("admit", admit, 1, 1 << 30),
        ):
            if type(number) is not int or not least <= number <= most:
                what = f"{label} must be a whole number of at least {least}, got {number!r}"
                raise UsageError(what, where=where)
        if not isinstance(scale, (int, float)) or not 0 <= scale < float("inf"):
            raise UsageError(f"scale must be at least 0, got {scale!r}", where=where)
        spec = TableSpec(name, "rows", served.optimizer, size, dim, float(scale), seed, keep, admit)
        if values is not None and tuple(values.shape) != (size, dim):
            what = f"values have the shape {tuple(values.shape)}, not {(size, dim)}"
            raise UsageError(what, where=where)
        table = self._declare_table(replace(spec, is_assigned=values is not None))
        if served.cache:
            place = torch.device(device)
            table.cache = RowCache(served.cache, dim, self._mode, place)
            self._questions.add_cache(table.cache)
        if values is not None and self._worker == 0:
            flat = move_to_host(values)
            for first in range(0, size, ASSIGNED_ROWS):
                ids = torch.arange(first, min(size, first + ASSIGNED_ROWS))
                part = flat[first : first + len(ids)]
                for server, mine in table.split_ids(ids):
                    link = self._links[server]
                    link.begin_assign(
                        table.numbers[server],
                        take_elements(part, mine),
                        ids=take_elements(ids, mine),
                    )
            self._open_table(table)

    def add_dense(self, name: str, served: ServedWeights, values: torch.Tensor) -> None:
        """
        Add a dense weight. Every worker does so; the values of rank 0 count.

        Args:
            values: its first values, and its shape.
        """
        if served.kind != "dense":
            raise UsageError("must be pdrun.dense()", where=f"served weight {name}")
        spec = TableSpec(name, "dense", served.optimizer, values.numel(), is_assigned=True)
        table = self._declare_table(spec)
        if self._worker == 0:
            flat = move_to_host(values).view(-1)
            for piece, server, first, last in table.list_pieces():
                self._links[server].begin_assign(
                    table.numbers[server], flat[first:last], piece=piece
                )
            self._open_table(table)

    def _declare_table(self, spec: TableSpec) -> DeclaredTable:
        self._questions.take_answers(self.step)
        name = spec.name
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or "|" in name:
            what = f"must be a name of 1 to {MAX_NAME_CHARS} characters without |, got {name!r}"
            raise UsageError(what, where="a served table")
        if name in self._tables:
            raise UsageError("is there already", where=f"served table {name}")
        if spec.size == 0 and spec.kind == "dense":
            raise UsageError("has no elements", where=f"served weight {name}")
        numbers = [link.declare_table(spec) for link in self._links]
        self._tables[name] = table = DeclaredTable(spec, numbers)
        return table

    def _open_table(self, table: DeclaredTable) -> None:
        self._order_all(Op.OPEN, table=table)

    def _find_table(self, name: str, kind: str) -> DeclaredTable:
        table = self._tables.get(name)
        if table is None or table.spec.kind != kind:
            known = [key for key, found in self._tables.items() if found.spec.kind == kind]
            what = f"there is no served table of {kind} {name!r}"
            raise UsageError(what, where="pdrun.servers", hint=did_you_mean(name, known))
        return table

    # ---- rows ---------------------------------------------------------------

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """
        Return the rows of ids, in their order; ids may repeat.

        Raises:
            UsageError: an id is out of range.
        """
        table = self._find_table(name, "rows")
        ids = check_ids(table.spec, ids)
        if table.cache is not None:
            return self._cached_rows(table, table.cache, ids)
        self._questions.take_answers(self.step)
        return self._fetch_rows(table, ids)

    def _fetch_rows(self, table: DeclaredTable, ids: torch.Tensor) -> torch.Tensor:
        dim = table.spec.dim
        if len(self._links) == 1:
            link = self._links[0]
            link.begin_rows(table.numbers[0], ids, dim)
            found = link.finish()
            assert isinstance(found, torch.Tensor)
            return found
        parts = table.split_ids(ids)
        for server, mine in parts:
            self._links[server].begin_rows(table.numbers[server], take_elements(ids, mine), dim)
        out = torch.empty(len(ids), dim)
        for server, mine in parts:
            found = self._links[server].finish()
            assert isinstance(found, torch.Tensor) and mine is not None
            out.index_copy_(0, mine, found)
        return out

    def has_cache(self, name: str) -> bool:
        """Return whether a table of rows has a cache."""
        return self._find_table(name, "rows").cache is not None

    def keep_known(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the ids that a table can have."""
        size = self._find_table(name, "rows").spec.size
        return ids[(ids >= 0) & (ids < size)] if size else ids

    def prefetch(self, name: str, ids: torch.Tensor) -> None:
        """
        Ask for the rows of ids, and return at once: a later `rows` finds them in the cache.

        Raises:
            UsageError: the table has no cache.
        """
        table = self._find_table(name, "rows")
        if table.cache is None:
            hint = f"use pdrun.rows(..., cache={len(ids)})"
            raise UsageError("has no cache", where=f"served table {name}", hint=hint)
        self._questions.take_answers(self.step)
        self._ask(table, table.cache, torch.unique(check_ids(table.spec, ids)))

    def _cached_rows(
        self, table: DeclaredTable, cache: RowCache, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return rows on the cache's device; ask the servers for those that may have changed."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        self._questions.take_answers(self.step)
        self._ask(table, cache, unique)
        self._questions.take_answers(self.step)
        found = cache.take_rows(unique, self.step)
        if found is None:  # the cache is too small for them
            return self._fetch_rows(table, ids).to(cache.device)
        return found.index_select(0, inverse.to(cache.device))

    def _ask(self, table: DeclaredTable, cache: RowCache, ids: torch.Tensor) -> None:
        """Ask the servers of unique ids for what has changed."""
        ids = ids[cache.find_stale(ids, self.step)]
        for server, mine in table.split_ids(ids):
            part = take_elements(ids, mine)
            if len(part):
                self._questions.ask(cache, server, table.numbers[server], part)

    def clear_caches(self) -> None:
        """Forget the rows of all caches: tables have been loaded."""
        self._questions.clear_caches()

    def push_rows(
        self,
        name: str,
        ids: torch.Tensor,
        grads: torch.Tensor,
        *,
        divisor: float = 1.0,
        part: int = 0,
    ) -> None:
        """
        Push gradients of rows; those of repeated ids are added.

        Args:
            divisor: gradients are divided by it where they are used.
            part: number of the micro-batch; gradients of a step are added in this order.

        Raises:
            UsageError: a gradient is nan or infinite, or an id is out of range; nothing is changed.
        """
        table = self._find_table(name, "rows")
        ids = check_ids(table.spec, ids)
        ids, grads = sum_repeated(ids, check_gradients(table.spec, ids, grads))
        self._questions.take_answers(self.step)
        self._begin_push_rows(table, PushHeader(self.step, part, divisor), ids, grads)
        self._finish_all()

    def _begin_push_rows(
        self, table: DeclaredTable, push: PushHeader, ids: torch.Tensor, grads: torch.Tensor
    ) -> None:
        """Push gradients of sorted, unique ids."""
        if table.cache is not None:
            table.cache.expire_rows(ids)
        for server, mine in table.split_ids(ids, every=True):
            self._links[server].begin_push(
                table.numbers[server],
                push,
                take_elements(grads, mine),
                ids=take_elements(ids, mine),
            )

    # ---- dense weights ------------------------------------------------------

    def pull(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """
        Return a dense weight, flat.

        Args:
            out: a contiguous fp32 tensor on the host to write to.
        """
        table = self._find_table(name, "dense")
        if out is None:
            out = torch.empty(table.spec.size)
        flat = out.view(-1)
        if flat.dtype != torch.float32 or len(flat) != table.spec.size or flat.is_cuda:
            what = f"out must have {table.spec.size} elements of fp32 on the host"
            raise UsageError(what, where=f"served weight {name}")
        self._questions.take_answers(self.step)
        for server, (pieces, outs) in table.split_pieces(flat).items():
            self._links[server].begin_pull(table.numbers[server], pieces, outs)
        self._finish_all()
        return out

    def push(self, name: str, grad: torch.Tensor, *, divisor: float = 1.0, part: int = 0) -> None:
        """Push the gradient of a dense weight; see `push_rows`."""
        table = self._find_table(name, "dense")
        flat = check_gradients(table.spec, None, grad)
        self._questions.take_answers(self.step)
        self._begin_push(table, PushHeader(self.step, part, divisor), flat)
        self._finish_all()

    def _begin_push(self, table: DeclaredTable, push: PushHeader, flat: torch.Tensor) -> None:
        for server, (pieces, grads) in table.split_pieces(flat).items():
            self._links[server].begin_push_pieces(table.numbers[server], push, pieces, grads)

    def push_pull(
        self, grads: Mapping[str, torch.Tensor], *, divisor: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Push gradients of dense weights, end the step, and return the new weights, flat."""
        for name, grad in grads.items():
            self.push(name, grad, divisor=divisor)
        self.clock()
        return {name: self.pull(name) for name in grads}

    # ---- steps and checkpoints ----------------------------------------------

    def clock(self) -> int:
        """
        End a step: all of its gradients are pushed. Wait for others as the mode demands.

        Returns:
            how many steps other workers have ended since this worker's last one, at most over the
            servers.

        Raises:
            DeadlineExceeded: other workers did not end the step in time; names them.
        """
        passed = self._order_all(Op.CLOCK, step=self.step)
        self.step += 1
        return max(passed)

    def push_step(self, gradients: Sequence[StepGradient], *, divisor: float = 1.0) -> int:
        """
        Push all gradients of a step and end it, without a wait between: what is in shared memory
        and the end are one message per server.

        Returns:
            what `clock` does.

        Raises:
            UsageError: a gradient is nan or infinite; nothing is pushed, the step goes on.
            DeadlineExceeded: see `clock`.
        """
        found = []
        for given in gradients:
            table = self._find_table(given.table, "dense" if given.ids is None else "rows")
            values = check_gradients(table.spec, given.ids, given.values)
            if len(gradients) * len(self._links) > 1:
                check_gradient(table.spec.name, values, divisor)  # before any server has one
            found.append((table, PushHeader(self.step, given.part, divisor, is_held=True), values))
        self._questions.take_answers(self.step)
        self._finish_all()
        for (table, push, values), given in zip(found, gradients, strict=True):
            if given.ids is None:
                self._begin_push(table, push, values)
            else:
                self._begin_push_rows(table, push, given.ids, values)
        for link in self._links:
            link.begin_order(Op.CLOCK, step=self.step)
        answers = [link.finish_last() for link in self._links]
        self.step += 1
        return max(passed for passed in answers if isinstance(passed, int))

    def save(self, folder: str | Path, *, later: str | Path | None = None) -> None:
        """
        Write the tables; one worker calls this. Each server writes its own, so the folder must be
        shared by their hosts.

        Args:
            later: name that the folder gets when it is complete; default: the same.
        """
        name = str(Path(later).absolute()) if later is not None else ""
        place = str(Path(folder).absolute())
        self._order_all(Op.SNAPSHOT, step=self.step, folder=place, later=name)

    def load(self, folder: str | Path) -> None:
        """
        Read the tables of any number of servers; one worker calls this, after all have added their
        tables.

        Raises:
            ConfigError: it is no complete checkpoint, or a table differs.
        """
        self._order_all(Op.RESTORE, folder=str(Path(folder).absolute()))
        self.clear_caches()

    def _order_all(
        self,
        op: Op,
        *,
        table: DeclaredTable | None = None,
        step: int = 0,
        folder: str = "",
        later: str = "",
    ) -> list[int]:
        self._questions.take_answers(self.step)
        self._finish_all()
        for server, link in enumerate(self._links):
            number = table.numbers[server] if table is not None else 0
            link.begin_order(op, table=number, step=step, folder=folder, later=later)
        return [found for link in self._links if isinstance(found := link.finish(), int)]

    def _finish_all(self) -> None:
        for link in self._links:
            link.finish_all()

    def close(self) -> None:
        """Leave the servers: they wait no longer for this worker."""
        for link in self._links:
            link.close()


def connect(mode: str = "sync", *, timeout: float = TIMEOUT_SECONDS) -> ServerClient:
    """
    Connect to the servers of this job, or make tables in this process if it has none.

    Args:
        mode: "sync", "async" or "bounded:K", the same on all workers; see `pdrun.Servers`.
        timeout: seconds of each wait.

    Raises:
        ConfigError: several workers, but no servers.
        PeerLost: a server does not answer.
    """
    parsed = parse_mode(mode, "pdrun.servers.connect")
    if not isinstance(timeout, (int, float)) or not 0 < timeout <= 86400:
        raise UsageError(f"timeout must be 0 to 86400 s, got {timeout!r}", where="pdrun.servers")
    directory = find_directory(timeout)
    if directory is None:
        return ServerClient([TablesInProcess(parsed)], 0, is_local=True, mode=parsed)
    # in sync mode a lost server ends the generation
    patience = 0.0 if parsed.name == "sync" else min(timeout, RETURN_SECONDS)
    identity = WorkerIdentity(
        directory.rank, parsed, directory.generation, float(timeout), patience
    )
    links = [
        RemoteLink(server, directory.key, identity, _addresses_of(directory, server))
        for server in range(directory.servers)
    ]
    return ServerClient(links, directory.rank, is_local=False, mode=parsed)


def _addresses_of(directory: ServerDirectory, server: int) -> Callable[[], list[str]]:
    return lambda: directory.find_addresses(server)
