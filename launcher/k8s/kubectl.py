"""
Run the user's own ``kubectl``: his contexts, login plug-ins and rights hold, and pdrun needs no
client library. Every call is bounded in time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdrun.errors import RendezvousError, UsageError

REQUEST_SECONDS = 20
"""Time limit of one request to the API server."""
COMMAND_SECONDS = 60.0
"""Time limit of a command, with its login."""
_NOT_FOUND = "(NotFound)"


@dataclass(frozen=True)
class Kubectl:
    """
    How kubectl is called.

    Raises:
        RendezvousError: a method's command failed or took too long; the message has its reason.
        UsageError: there is no kubectl.
    """

    namespace: str = ""
    """Empty: that of the context."""
    context: str = ""
    """Empty: the current one."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def make_command(self, *words: str) -> list[str]:
        """Return a command line."""
        program = shutil.which("kubectl", path=self.environ.get("PATH", os.defpath))
        if program is None:
            raise UsageError(
                "kubectl was not found on PATH",
                where="pdrun k8s",
                hint="install it, or apply what pdrun k8s render prints elsewhere",
            )
        command = [program]
        if self.context:
            command.append(f"--context={self.context}")
        if self.namespace:
            command.append(f"--namespace={self.namespace}")
        return [*command, *words]

    def run(self, *words: str, stdin: str = "", seconds: float = COMMAND_SECONDS) -> str:
        """Run a command and return its stdout."""
        done = self._complete(words, stdin, seconds)
        if done.returncode:
            raise RendezvousError(_first_error(done.stderr), where=f"kubectl {words[0]}")
        return done.stdout

    def get(self, *words: str) -> Any:
        """Return the object or the List of ``kubectl get WORDS``; None: it does not exist."""
        command = ("get", *words, "-o", "json", f"--request-timeout={REQUEST_SECONDS}s")
        done = self._complete(command, "", COMMAND_SECONDS)
        if done.returncode and _NOT_FOUND in done.stderr:
            return None
        if done.returncode:
            raise RendezvousError(_first_error(done.stderr), where="kubectl get")
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise RendezvousError("its output is not JSON", where="kubectl get") from None

    def list_items(self, *words: str) -> list[dict[str, Any]]:
        """Return the items of a list of objects."""
        found = self.get(*words)
        items = found.get("items", []) if isinstance(found, dict) else []
        return [item for item in items if isinstance(item, dict)]

    def succeeds(self, *words: str) -> bool:
        """Return whether a command ends with 0."""
        return self._complete(words, "", COMMAND_SECONDS).returncode == 0

    def _complete(
        self, words: Sequence[str], stdin: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        command = self.make_command(*words)
        try:
            return subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                env=dict(self.environ),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RendezvousError(
                f"no answer after {seconds:g} s",
                where=f"kubectl {words[0]}",
                hint="is the cluster reachable? try kubectl version",
            ) from None
        except OSError as error:
            raise UsageError(f"cannot be run: {error.strerror}", where=command[0]) from None


def _first_error(text: str) -> str:
    """Return the line of kubectl's stderr that has the reason, bounded in length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Warning:")] or lines
    reasons = [line for line in lines if line.lower().startswith(("error", "the "))] or lines
    line = reasons[0] if reasons else "it failed without a message"
    if line.endswith(":"):  # the fields of a conflict follow, one a line
        line += " " + ", ".join(one[2:] for one in lines if one.startswith("- "))
    return line.removeprefix("error: ").removeprefix("Error from server ")[:600]
