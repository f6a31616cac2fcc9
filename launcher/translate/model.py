"""A translation: pdrun's command line, and what differs from the other launcher's."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import hint_at_dash, quote_text
from pdrun.launcher.common.python_command import read_python_command
from pdrun.launcher.hosts.selection import Host


@dataclass
class Translation:
    """A command line of pdrun, filled option by option."""

    launcher: str
    options: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)
    """The script or command with its arguments."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of pdrun's own environment."""
    wrapper: list[str] = field(default_factory=list)
    """The program that starts pdrun, with its options: ``srun -N 2``."""
    notes: list[str] = field(default_factory=list)
    """What the launcher does differently."""
    left_out: list[str] = field(default_factory=list)
    """Which options of its command line have no effect under pdrun, and why."""
    runs_in_background: bool = False

    @property
    def words(self) -> list[str]:
        """The words behind ``pdrun``."""
        return [*self.options, *self.program]

    def add(self, *words: str) -> None:
        """Add an option, with its value if it has one."""
        self.options += words

    def add_unless_default(self, option: str, value: str, default: str) -> None:
        """Add an option and its value, unless the value is what pdrun does without it."""
        if value != default:
            self.add(option, value)

    def add_hosts(self, counted: Iterable[tuple[Host, int]]) -> None:
        """Add ``--hosts`` with the number of workers of each host."""
        items = []
        for host, workers in counted:
            if host.port is not None:
                raise UsageError(
                    f"{host.name}: a port of ssh has no place beside a number of workers",
                    where=host.where or self.launcher,
                    hint="write the numbers into the host file: pdrun --hostfile FILE",
                )
            address = f"[{host.name}]" if ":" in host.name else host.name
            login = f"{host.user}@{address}" if host.user else address
            items.append(f"{login}:{workers}")
        self.add("--hosts", ",".join(items))

    def set_program(self, words: Sequence[str], *, is_module: bool, is_command: bool) -> None:
        """Set the program: a script, a module or a command, with its arguments."""
        if not words:
            raise UsageError("no program to run", where=self.launcher)
        if hint := hint_at_dash(words[0]):
            raise UsageError(f"no program {quote_text(words[0])}", where=self.launcher, hint=hint)
        if is_module and is_command:
            raise UsageError(
                "--module and --no-python exclude each other",
                where=self.launcher,
                hint="remove one of them",
            )
        if is_module:
            self.add("-m")
        elif is_command:
            self.add("--no-python")
        if words[0].startswith("-"):
            self.program = ["--"]
        elif not self.options:
            self.program = ["run"]  # the script may have the name of a command of pdrun
        self.program = [*self.program, *words]

    def set_command(self, words: Sequence[str]) -> None:
        """Set the program of a launcher that starts any command, as ``python -u train.py``."""
        if not words:
            raise UsageError("no program to run", where=self.launcher)
        found = read_python_command(words)
        if found is None:
            self.set_program(words, is_module=False, is_command=True)
            return
        if found.python:
            self.add("--python", found.python)
        is_module = found.kind == "module"
        is_command = found.kind == "command"
        self.set_program((found.target, *found.args), is_module=is_module, is_command=is_command)

    def format_hint(self) -> str:
        """Return the command line, with the options that are left out, for a message."""
        reasons = f" ({'; '.join(self.left_out)})" if self.left_out else ""
        return self.format_line() + reasons

    def format_line(self) -> str:
        """Return the command line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*variables, shlex.join([*self.wrapper, "pdrun", *self.words])])
        if self.runs_in_background:
            return f"nohup {line} &" if not variables else f"nohup env {line} &"
        return line
