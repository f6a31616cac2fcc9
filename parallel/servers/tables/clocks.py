"""
The clocks of the workers, and who must wait for whom. Pure: no thread, no time.

    sync        a step is used when every worker has ended it
    bounded:K   a worker waits while the slowest living one is more than K steps behind
    async       no worker waits
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrun.parallel.servers.settings import Mode


@dataclass
class StepClocks:
    """
    The last step that each worker has ended.

    Args:
        workers: number of workers of the job.
    """

    mode: Mode
    workers: int
    used_step: int = -1
    """sync: the last step whose gradients were used."""
    _ended: dict[int, int] = field(default_factory=dict)
    _passed: dict[int, int] = field(default_factory=dict)
    """Steps that the others had ended at a worker's own last step."""
    _total: int = 0

    def __post_init__(self) -> None:
        # who has not connected yet is at the start, and others wait for it
        self._ended = dict.fromkeys(range(self.workers), -1)

    def end_step(self, worker: int, step: int) -> int:
        """
        Note that a worker has ended a step; return how many steps the others have ended since its
        last one.
        """
        if step > self._ended.get(worker, -1):
            self._ended[worker] = step
            self._total += 1
        mine = self._passed.get(worker, self._total)
        self._passed[worker] = self._total
        return max(0, self._total - mine - 1)

    def remove_worker(self, worker: int) -> None:
        """Forget a lost worker: others do not wait for its clock."""
        self._ended.pop(worker, None)
        self._passed.pop(worker, None)

    def join_worker(self, worker: int, step: int = -1) -> None:
        """Give a worker its clock; one that replaces a lost one gets that of the slowest."""
        if worker not in self._ended:
            self._ended[worker] = max(step, min(self._ended.values(), default=-1))

    def forget_workers(self) -> None:
        """Wait for no worker that has not joined again: this server has lost what it knew."""
        self._ended.clear()

    def missing_workers(self, step: int) -> list[int]:
        """Return the workers that have not ended a step."""
        return [worker for worker in range(self.workers) if self._ended.get(worker, -1) < step]

    def can_use(self, step: int) -> bool:
        """Return whether the gradients of a step must be used now (sync)."""
        return self.used_step < step and not self.missing_workers(step)

    def find_blocking(self, worker: int, step: int) -> list[int]:
        """Return the workers for which a worker that has ended ``step`` must wait."""
        if self.mode.name == "async":
            return []
        if self.mode.name == "sync":
            return [] if self.used_step >= step else self.missing_workers(step)
        limit = step - self.mode.bound
        return [other for other, ended in sorted(self._ended.items()) if ended < limit]
