"""
Read job files (``pdrun run job.yaml``) strictly. Every error names file and line.

YAML guesses types: ``no`` is false, ``22:30`` is 1350. Such guesses can start a job of the wrong
size. So only the structure comes from YAML. Each scalar is the text in the file, read by the
parsers of the command line. Text that YAML would convert must be quoted. Anchors, tags, duplicate
and unknown keys, several documents and deep nesting are refused. templates/job.yaml has every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from pdrun.endpoint import parse_port_range
from pdrun.errors import ConfigError, UsageError, did_you_mean
from pdrun.launcher.adapters import names
from pdrun.launcher.adapters.ssh_command import split_options, split_ssh_options
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.common.files import read_text
from pdrun.launcher.common.parsers import Parser, quote_text
from pdrun.launcher.config.settings import Priority, Setting, Source
from pdrun.launcher.config.spec import BACKENDS
from pdrun.launcher.hosts import selection

MAX_FILE_BYTES = 1 << 18
"""Size limit of a job file."""
MAX_DEPTH = 8
MAX_EVENTS = 5_000
"""Limits of nesting and of YAML events. A job file has a depth of 3."""

_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
"""Numbers that YAML does not change. ``010``, ``0x10``, ``1_000`` and ``22:30`` are not plain."""


def _parse_true_false(text: str, where: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise UsageError(f"must be true or false, got {quote_text(text)}", where=where)


KEY_PARSERS: Mapping[str, Mapping[str, Parser]] = {
    "program": {
        "script": parsers.parse_text,
        "module": parsers.parse_text,
        "command": parsers.parse_text,
        "python": parsers.parse_path,
        "start": parsers.choice_parser("auto", "fork", "exec"),
        "warm": _parse_true_false,
        "local_rank_arg": parsers.parse_option_name,
        "stdin": parsers.int_parser(0),
    },
    "resources": {
        "nodes": parsers.parse_node_range,
        "spares": parsers.int_parser(0),
        "servers": parsers.parse_servers,
        "devices": parsers.int_or_auto_parser(),
        "backend": parsers.choice_parser(*BACKENDS),
        "threads": parsers.int_or_auto_parser(),
        "bind": rank_lists.parse_binding,
    },
    "policy": {
        "start_timeout": parsers.parse_duration,
        "grace": parsers.parse_duration_or_zero,
        "max_restarts": parsers.int_parser(0),
        "restart_window": parsers.parse_duration,
        "restart_on": parsers.parse_exit_codes,
        "no_restart_on": parsers.parse_exit_codes,
        "backoff": parsers.parse_duration_or_zero,
        "gather": parsers.parse_duration_or_zero,
        "grow": parsers.parse_duration_or_zero,
        "scheduler_loss": parsers.parse_scheduler_loss,
        "hang_timeout": parsers.parse_duration,
        "time_limit": parsers.parse_duration,
    },
    "output": {
        "log_dir": parsers.parse_path,
        "log_name": parsers.parse_log_name,
        "files": _parse_true_false,
        "show_ranks": rank_lists.parse_ranks,
        "show_stderr": rank_lists.parse_ranks,
        "prefix": parsers.choice_parser("auto", "rank", "none"),
        "screen": parsers.choice_parser("auto", "line", "none"),
    },
    "place": {
        "scheduler": parsers.endpoint_parser(),
        "store": parsers.endpoint_parser(),
        "node_rank": parsers.int_parser(0),
        "node_name": parsers.parse_node_name,
        "local": _parse_true_false,
        "interface": parsers.parse_interface,
        "serve": _parse_true_false,
        "port_range": parse_port_range,
        "token_file": parsers.parse_path,
        "hosts": selection.parse_hosts,
        "hostfile": parsers.parse_path,
        "include": selection.parse_host_choice,
        "exclude": selection.parse_host_choice,
        "rank_table": parsers.parse_path,
        "launcher": names.check_launcher,
    },
    "reach": {
        "ssh": parsers.parse_path,
        "ssh_opts": split_ssh_options,
        "ssh_window": parsers.int_parser(1, 10_000),
        "forward": parsers.parse_patterns,
        "ship": _parse_true_false,
        "mpirun": parsers.parse_path,
        "mpirun_opts": split_options,
        "srun_opts": split_options,
    },
}
"""All keys of a job file except ``program.args``, ``env``, ``job`` and ``chdir``."""
FIELD_PATHS = {
    "place.hosts": "hosts.all",
    "place.hostfile": "hosts.file",
    "place.include": "hosts.include",
    "place.exclude": "hosts.exclude",
}
"""Field paths of keys that `pdrun.launcher.config.combine` combines."""
ADDRESS_KEYS = ("scheduler", "store")
"""Keys of ``place`` whose host and port it combines with those of options and variables."""
TOP_LEVEL_PARSERS: Mapping[str, Parser] = {
    "job": parsers.parse_job_name,
    "chdir": parsers.parse_path,
}
REFUSAL_REASONS = {
    "place.insecure": "must be set on the command line (--insecure), not in a file",
    "place.simulated": "is internal; use local: true",
    "place.node_names": "is derived from place.hosts",
    "resources.min_nodes": "is MIN of nodes: 'MIN:MAX'",
    "resources.indices": "is derived from place.hosts and place.include",
    "program.kind": "is derived from the key: use script, module or command",
    "program.target": "is set by the key script, module or command",
    "program.prober": "is made from the options of pdrun serve",
    "program.is_per_node": "is made from --per of pdrun serve",
}


def load_job_file(path: str) -> tuple[Setting, ...]:
    """
    Read a job file.

    Raises:
        UsageError: the file does not exist.
        ConfigError: the file is not a valid job; the message names file and line.
    """
    text = read_text(path, MAX_FILE_BYTES)
    name = Path(path).name
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _yaml_error(error, name) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {_one_line(error)}", where=name) from None
    return tuple(JobFileReader(name).read_job(root))


def _yaml_error(error: yaml.MarkedYAMLError, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    problem = error.problem or "cannot be read"
    if "'\\t'" in problem:
        return ConfigError("tabs are not allowed in indentation", where=where, hint="use spaces")
    return ConfigError(f"is not YAML: {_one_line(problem)}", where=where)


def _one_line(what: object) -> str:
    return " ".join(str(what).split())[:200]


def _check_events(text: str, name: str) -> None:
    """Refuse YAML features that a job file does not need. This pass does not recurse."""
    depth = documents = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        where = f"{name}:{event.start_mark.line + 1}" if event.start_mark else name
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(
                    "must have one document, got a second one",
                    where=where,
                    hint="use one file per job",
                )
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(
                "anchors and aliases (& and *) are not allowed",
                where=where,
                hint="repeat the value",
            )
        if tag := getattr(event, "tag", None):
            raise ConfigError(
                f"tag {quote_text(str(tag))} is not allowed", where=where, hint="remove it"
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > MAX_DEPTH or count > MAX_EVENTS:
            raise ConfigError("is nested too deeply or too large", where=where)


class JobFileReader:
    """Reads the YAML nodes of one file and yields settings."""

    def __init__(self, name: str) -> None:
        self.name = name

    def locate(self, node: yaml.Node) -> str:
        """Return file and line of a node."""
        return f"{self.name}:{node.start_mark.line + 1}"

    def make_source(self, node: yaml.Node, text: str = "") -> Source:
        """Return the source of a node's value."""
        return Source(self.locate(node), Priority.FILE, text)

    def read_job(self, root: yaml.Node | None) -> Iterator[Setting]:
        """Yield the settings of the file."""
        if root is None:
            raise ConfigError("is empty", where=self.name)
        known = (*KEY_PARSERS, "env", *TOP_LEVEL_PARSERS)
        for key, value in self.iter_items(root, "the file"):
            name = self.read_key(key, known, "")
            if name == "env":
                yield from self.read_env(value)
            elif name in TOP_LEVEL_PARSERS:
                yield self.read_value(name, value, TOP_LEVEL_PARSERS[name])
            else:
                yield from self.read_group(name, value)

    def read_group(self, group: str, node: yaml.Node) -> Iterator[Setting]:
        """Yield the settings of one group, such as ``resources``."""
        keys = KEY_PARSERS[group]
        for key, value in self.iter_items(node, group):
            name = self.read_key(key, (*keys, "args") if group == "program" else tuple(keys), group)
            if name == "args":
                yield self.read_args(value)
            elif name in ("script", "module", "command"):
                yield self.read_value("program.target", value, keys[name])
                yield Setting("program.kind", name, self.make_source(key, name))
            elif name == "nodes":
                both = self.read_value("resources.nodes", value, keys[name])
                yield Setting("resources.nodes", both.value[1], both.source)
                yield Setting("resources.min_nodes", both.value[0], both.source)
            elif name in ADDRESS_KEYS:
                address = self.read_value(f"place.{name}", value, keys[name])
                yield Setting(f"{name}.host", address.value.host, address.source)
                yield Setting(f"{name}.port", address.value.port, address.source)
            else:
                path = f"{group}.{name}"
                yield self.read_value(FIELD_PATHS.get(path, path), value, keys[name])

    def iter_items(self, node: yaml.Node, what: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """Yield the pairs of a mapping; a duplicate key raises ConfigError."""
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{what} must be a mapping of KEY: VALUE lines", where=self.locate(node)
            )
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError("a key must be text", where=self.locate(key))
            if key.value in lines:
                raise ConfigError(
                    f"{quote_text(key.value)} is set twice",
                    where=self.locate(key),
                    hint=f"first on line {lines[key.value]}",
                )
            lines[key.value] = key.start_mark.line + 1
            yield key, value

    def read_key(self, node: yaml.ScalarNode, known: tuple[str, ...], group: str) -> str:
        """Return a key; raise ConfigError if it is unknown in this group."""
        name = str(node.value)
        if name in known:
            return name
        reason = REFUSAL_REASONS.get(f"{group}.{name}")
        if reason:
            raise ConfigError(f"{name} {reason}", where=self.locate(node))
        hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
        what = f"unknown key {quote_text(name)}"
        if group:
            what += f" in {group}"
        else:
            for other, keys in KEY_PARSERS.items():
                if name in keys:
                    hint = f"it belongs to {other}"
                    break
        raise ConfigError(what, where=self.locate(node), hint=hint)

    def read_value(self, path: str, node: yaml.Node, parser: Parser) -> Setting:
        """Parse the value of one key."""
        is_flag = parser is _parse_true_false
        text = self.read_scalar(node, path.rpartition(".")[2], is_flag=is_flag)
        source = self.make_source(node, text)
        try:
            return Setting(path, parser(text, source.label), source)
        except UsageError as error:
            raise source.convert_error(error) from None

    def read_scalar(self, node: yaml.Node, what: str, *, is_flag: bool = False) -> str:
        """
        Return the text of a scalar. If YAML would convert it, raise ConfigError.
        """
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{what} must be one value", where=self.locate(node))
        text = str(node.value)
        kind = node.tag.rpartition(":")[2]
        if node.style is not None or kind == "str" or (is_flag and text in ("true", "false")):
            return text
        if kind in ("int", "float") and _PLAIN_NUMBER.fullmatch(text):
            return text
        if kind == "null":
            raise ConfigError(
                f"{what} has no value", where=self.locate(node), hint="remove the line"
            )
        if is_flag and kind == "bool":
            raise ConfigError(
                f"{what} must be true or false, got {quote_text(text)}", where=self.locate(node)
            )
        kinds = {"bool": "true or false", "int": "another number", "float": "another number"}
        read = kinds.get(kind, f"a {kind}")
        raise ConfigError(
            f"{what}: YAML reads {text} as {read}",
            where=self.locate(node),
            hint=f"quote it: '{text}'",
        )

    def read_args(self, node: yaml.Node) -> Setting:
        """Read ``program.args``."""
        if not isinstance(node, yaml.SequenceNode):
            raise ConfigError(
                "args must be a list", where=self.locate(node), hint="example: [--lr, 3e-4]"
            )
        return Setting(
            "program.args",
            tuple(self.read_scalar(item, "an argument") for item in node.value),
            self.make_source(node),
        )

    def read_env(self, node: yaml.Node) -> Iterator[Setting]:
        """Yield the variables of ``env``."""
        for key, value in self.iter_items(node, "env"):
            if "=" in str(key.value):  # the assignment below would be split there
                raise ConfigError(
                    f"{quote_text(str(key.value))} is not the name of a variable",
                    where=self.locate(key),
                )
            text = self.read_scalar(value, str(key.value))
            source = self.make_source(key, f"{key.value}={text}")
            try:
                name, text = parsers.parse_assignment(f"{key.value}={text}", source.label)
            except UsageError as error:
                raise source.convert_error(error) from None
            yield Setting(f"env.{name}", text, source)
