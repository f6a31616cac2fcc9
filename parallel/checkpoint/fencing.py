"""
Fencing of checkpoints: no rank of an earlier generation completes a save after a later one began.

A machine may stand still for minutes in the middle of a save. When it goes on, its job may have
started again elsewhere. So each generation claims a folder before it uses it:

    claim     create the marker `.generation-KEY-N`, then rename the hidden folders of earlier ones
    save      create a hidden folder, look for markers of later generations, write, rename it

A hidden folder is renamed exactly once: to the checkpoint, or away by a claim. A hidden folder that
is created after the claim's renames finds the marker, which was created before them. KEY stands for
the run (PDRUN_RUN): two jobs that share a folder do not fence each other. A first generation needs
no marker, and a program without pdrun is not fenced.

Limits: a script that writes files itself is not fenced. The later generation must load from the
folder, or save to it, once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint import storage

RUN_VARIABLE = "PDRUN_RUN"
GENERATION_VARIABLE = "PDRUN_GENERATION"
MARKER_PREFIX = ".generation-"
HIDDEN_PREFIX = ".new-"
REVOKED_PREFIX = ".revoked-"
FORGET_SECONDS = 86400.0
"""Age at which the marker of another run is removed."""


class GenerationFence:
    """A folder as one generation of one run uses it."""

    def __init__(self, folder: Path, run: str, generation: int) -> None:
        self._folder = folder
        self._key = hashlib.sha256(run.encode()).hexdigest()[:12] if run else ""
        self._generation = generation

    @classmethod
    def of_worker(cls, folder: Path) -> GenerationFence:
        """Return the fence of this worker's generation."""
        number = os.environ.get(GENERATION_VARIABLE, "")
        generation = int(number) if number.isdecimal() else 0
        return cls(folder, os.environ.get(RUN_VARIABLE, ""), generation)

    def hidden_folder(self, name: str) -> Path:
        """Return the folder in which this generation writes a checkpoint."""
        if not self._key:
            return self._folder / f"{HIDDEN_PREFIX}{name}"
        return self._folder / f"{HIDDEN_PREFIX}{name}-{self._key}-{self._generation}"

    def claim(self, *, is_for_load: bool = False) -> None:
        """
        Claim the folder for this generation, and revoke what earlier ones have not completed.

        Args:
            is_for_load: what other runs have not completed stays: one of them may be saving.

        Raises:
            ConfigError: a later generation has claimed it.
        """
        self.check()
        if self._key and self._generation:
            (self._folder / f"{MARKER_PREFIX}{self._key}-{self._generation}").touch()
        for path in self._folder.glob(f"{HIDDEN_PREFIX}{storage.FOLDER_PREFIX}*"):
            is_ours = f"-{self._key}-" in path.name
            if (is_ours or not is_for_load) and self._generation_of(path.name) <= self._generation:
                _remove_hidden(path)
        self._remove_old()

    def claim_to_load(self) -> None:
        """Claim the folder, if this is a later generation that may; never raises."""
        if not self._key or not self._generation:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.claim(is_for_load=True)
        except (OSError, ConfigError):
            pass  # a folder that is only read; or a save will report the later generation

    def check(self) -> None:
        """
        Check that no later generation has claimed the folder.

        Raises:
            ConfigError: one has.
        """
        names = (path.name for path in self._folder.glob(f"{MARKER_PREFIX}{self._key}-*"))
        newest = max(map(self._generation_of, names), default=0)
        if self._key and newest > self._generation:
            raise ConfigError(
                f"is not written: generation {newest} of this job has begun, and this worker"
                f" belongs to generation {self._generation}",
                where=str(self._folder),
            )

    def _generation_of(self, name: str) -> int:
        """Return the generation in a name of this run; 0 if it has none."""
        head, _, number = name.rpartition("-")
        return int(number) if head.endswith(self._key or "?") and number.isdecimal() else 0

    def _remove_old(self) -> None:
        """Remove markers that no longer decide, of earlier generations and runs, and remains."""
        for path in self._folder.glob(f"{REVOKED_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f"{MARKER_PREFIX}*"):
            generation = self._generation_of(path.name)
            try:
                is_old = time.time() - path.stat().st_mtime > FORGET_SECONDS
                if 0 < generation < self._generation or (not generation and is_old):
                    path.unlink()
            except OSError:
                continue


def _remove_hidden(path: Path) -> None:
    """Rename a hidden folder in one step, so that it is not published half removed; remove it."""
    gone = path.with_name(f"{REVOKED_PREFIX}{path.name.lstrip('.')}")
    try:
        path.rename(gone)
    except OSError:
        gone = path
    shutil.rmtree(gone, ignore_errors=True)
