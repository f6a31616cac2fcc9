"""
``--pod FILE``: what a site adds to the pods: tolerations, node selectors, sidecars, annotations.

The file is a part of a pod: ``metadata`` and ``spec``. Mappings are merged. Items of lists that
have a name (containers, volumes, env) replace those of that name; other items are appended. What
pdrun itself decides is refused, with the line of the file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pdrun.errors import ConfigError, did_you_mean
from pdrun.launcher.common.files import read_text
from pdrun.launcher.k8s.pod import CONTAINER_NAME, JOB_LABEL, Manifest

MAX_FILE_BYTES = 1 << 18
MAX_DEPTH = 24
OWN_FIELDS = {
    ("spec", "restartPolicy"): "pdrun restarts the workers itself",
    ("spec", "subdomain"): "it is the job's service",
    ("spec", "hostname"): "it is the pod's name",
    ("spec", "terminationGracePeriodSeconds"): "use --grace",
    ("metadata", "name"): "use --name",
    ("metadata", "namespace"): "use --namespace",
    ("metadata", "labels", JOB_LABEL): "it is the job's name",
}
"""Fields of a pod that pdrun decides, and why."""
OWN_CONTAINER_FIELDS = {
    "command": "it is pdrun's command line",
    "args": "they follow the script on the command line",
    "image": "use --image",
}
"""Fields of pdrun's container that pdrun decides."""
_MERGED_BY = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name"}
_MERGED_BY["volumeMounts"] = "mountPath"
"""List -> the key that identifies its items."""

_Path = tuple[str, ...]
_Lines = Mapping[_Path, int]
_NO_LINES: _Lines = {}


def read_overlay(path: str) -> Manifest:
    """
    Read and check an overlay.

    Raises:
        UsageError: the file does not exist.
        ConfigError: it is not a part of a pod, or sets what pdrun decides; with file and line.
    """
    name = Path(path).name
    text = read_text(path, MAX_FILE_BYTES)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):  # a few lines of them can mean a million items
                where = f"{name}:{event.start_mark.line + 1}" if event.start_mark else name
                raise ConfigError(
                    "aliases (*) are not allowed", where=where, hint="repeat the value"
                )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or "is nested too deeply"
        raise ConfigError(f"is not YAML: {problem}", where=where) from None
    lines = dict(_iter_lines(root, (), 0, name)) if root is not None else {}
    check_overlay(data, name, lines)
    merged: Manifest = data
    return merged


def check_overlay(data: object, name: str, lines: _Lines = _NO_LINES) -> None:
    """
    Refuse what is no part of a pod, and what pdrun decides.

    Args:
        data: the overlay.
        name: of its file or field, for messages.
        lines: line of each key in the file.

    Raises:
        ConfigError: it is wrong.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            "must be a part of a pod", where=name, hint="example: spec: {nodeSelector: {gpu: a100}}"
        )
    for key in data:
        if key not in ("metadata", "spec"):
            hint = did_you_mean(str(key), ("metadata", "spec")) or "known: metadata, spec"
            if key in ("apiVersion", "kind"):
                hint = "leave it out: the file is only a part of a pod"
            raise ConfigError(f"unknown key {key}", where=_locate(name, lines, (key,)), hint=hint)
        if not isinstance(data[key], dict):
            raise ConfigError("must be a mapping", where=_locate(name, lines, (key,)))
    _refuse_own_fields(data, name, lines)


def _iter_lines(node: yaml.Node, path: _Path, depth: int, name: str) -> Iterator[tuple[_Path, int]]:
    """Yield the line of every key; an item of a list has the name of its index."""
    if depth > MAX_DEPTH:
        raise ConfigError("is nested too deeply", where=f"{name}:{node.start_mark.line + 1}")
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            part = (*path, str(getattr(key, "value", "")))
            yield from _iter_lines(value, part, depth + 1, name)
            yield part, key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _iter_lines(item, (*path, str(index)), depth + 1, name)


def _locate(name: str, lines: _Lines, path: _Path) -> str:
    while path and path not in lines:
        path = path[:-1]
    return f"{name}:{lines[path]}" if path in lines else name


def _refuse_own_fields(data: Manifest, name: str, lines: _Lines) -> None:
    for path, reason in OWN_FIELDS.items():
        part: Any = data
        for key in path:
            part = part.get(key) if isinstance(part, dict) else None
        if part is not None:
            raise ConfigError(
                f"{'.'.join(path)} is set by pdrun: {reason}", where=_locate(name, lines, path)
            )
    containers = data.get("spec", {}).get("containers", [])
    if not isinstance(containers, list):
        raise ConfigError("must be a list", where=_locate(name, lines, ("spec", "containers")))
    for index, container in enumerate(containers):
        path = ("spec", "containers", str(index))
        where = _locate(name, lines, path)
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            raise ConfigError(
                "a container needs a name",
                where=where,
                hint=f"pdrun's own is called {CONTAINER_NAME}",
            )
        if container["name"] == CONTAINER_NAME:
            _refuse_in_container(container, name, lines, path)


def _refuse_in_container(container: Manifest, name: str, lines: _Lines, path: _Path) -> None:
    for key, reason in OWN_CONTAINER_FIELDS.items():
        if key in container:
            raise ConfigError(
                f"{key} of the container {CONTAINER_NAME} is set by pdrun: {reason}",
                where=_locate(name, lines, (*path, key)),
            )
    for index, variable in enumerate(container.get("env") or []):
        known = variable.get("name") if isinstance(variable, dict) else None
        if known in ("PDRUN_TOKEN", "PDRUN_JOB"):
            raise ConfigError(
                f"{known} is set by pdrun", where=_locate(name, lines, (*path, "env", str(index)))
            )


def apply_overlay(template: Manifest, overlay: Manifest) -> Manifest:
    """Return a template with an overlay merged into it. Neither argument is changed."""
    return _merge_mappings(copy.deepcopy(template), copy.deepcopy(overlay))


def _merge_mappings(base: Manifest, more: Manifest) -> Manifest:
    for key, value in more.items():
        known = base.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge_mappings(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            _merge_lists(known, value, _MERGED_BY.get(key, ""))
        else:
            base[key] = value
    return base


def _merge_lists(base: list[Any], more: list[Any], identity: str) -> None:
    for item in more:
        key = item.get(identity) if identity and isinstance(item, dict) else None
        for known in base:
            if key is not None and isinstance(known, dict) and known.get(identity) == key:
                _merge_mappings(known, item)
                break
        else:
            base.append(item)
