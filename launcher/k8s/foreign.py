"""
``--from FILE``: read a job of another operator, and give it to pdrun.

    PyTorchJob, MSJob, AscendJob    replicas of pods, each with its command
    MPIJob                          mpirun in a launcher's pod, and the workers' pods
    TrainJob                        Kubeflow Trainer v2: a command and a number of nodes

The pods' command is translated as ``pdrun translate`` does. What the old job says about nodes,
ranks and addresses is dropped: the index of each pod says it. The rest of the pods stays: image,
volumes, variables, limits, node selectors.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pdrun.errors import ConfigError, PdrunError
from pdrun.launcher.common.files import read_text
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.k8s.options import DEVICE_RESOURCES
from pdrun.launcher.k8s.pod import CONTAINER_NAME, Manifest
from pdrun.launcher.translate.command_line import is_launcher, translate_command_line
from pdrun.launcher.translate.model import Translation

MAX_FILE_BYTES = 1 << 20
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
_PLACE_OPTIONS = re.compile(
    r"--(?:nodes|nnodes|node[_-]rank|master[_-](?:addr|port)|rdzv[_-]\w+|scheduler|job|"
    r"sched[_-](?:host|port)|hosts?|hostfile|launcher)"
)
"""Options of a launcher, or of pdrun, that say where a node is."""
_PLACE_VARIABLES = re.compile(
    r"MASTER_(?:ADDR|PORT)|RANK|WORLD_SIZE|NODE_RANK|NNODES|PET_\w+|PDRUN_\w+|MS_\w+"
)
_KUBERNETES_VARIABLE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_ANY_VARIABLE = re.compile(r"\$\(([A-Za-z_]\w*)\)|\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
_SHELL_SYNTAX = re.compile(r"[;&|<>`$(){}\n*?]")
_OTHER_RESOURCES = ("huawei.com/Ascend310", "huawei.com/Ascend310P")


@dataclass(frozen=True)
class ForeignJob:
    """What another operator's job asks for, in pdrun's words."""

    kind: str
    name: str
    namespace: str
    image: str
    nodes: int
    devices: int | None
    """Accelerators, or workers, of a node; None: it does not say."""
    backend: str
    """Backend whose devices the pods ask for; empty: none."""
    words: tuple[str, ...]
    """Arguments of ``pdrun run`` behind ``--nodes`` and ``--devices``."""
    overlay: Manifest
    """The rest of its pods."""
    notes: tuple[str, ...] = field(default=())


def read_foreign_job(path: str) -> ForeignJob:
    """
    Read the first job of a file.

    Raises:
        UsageError: the file does not exist.
        ConfigError: it has no job of a known kind, or one that pdrun cannot express.
    """
    name = Path(path).name
    try:
        documents = list(yaml.safe_load_all(read_text(path, MAX_FILE_BYTES)))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError("is not YAML", where=where) from None
    kinds = []
    for body in documents:
        kind = str(body.get("kind") or "") if isinstance(body, dict) else ""
        if kind in _READERS:
            try:
                return _READERS[kind](_Source(name, kind, body))
            except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
                raise ConfigError(
                    f"is not a complete {kind}: {type(error).__name__} {error}", where=name
                ) from None
        if kind:
            kinds.append(kind)
    found = f"has {', '.join(kinds)}" if kinds else "has no object of Kubernetes"
    raise ConfigError(
        f"{found}, and none that is translated", where=name, hint=f"known: {', '.join(_READERS)}"
    )


@dataclass(frozen=True)
class _Source:
    """A job's object, and the file of it."""

    file: str
    kind: str
    body: Manifest

    @property
    def spec(self) -> Manifest:
        spec = self.body["spec"]
        if not isinstance(spec, dict):
            raise TypeError("spec is not a mapping")
        return spec

    def fail(self, what: str, hint: str = "") -> ConfigError:
        return ConfigError(what, where=f"{self.file}: {self.kind}", hint=hint)


def _read_replicas(source: _Source) -> ForeignJob:
    """PyTorchJob, MSJob, AscendJob: replicas by role."""
    spec = source.spec
    key = next(
        one for one in ("pytorchReplicaSpecs", "msReplicaSpecs", "replicaSpecs") if one in spec
    )
    roles: Mapping[str, Manifest] = spec[key]
    parts = {role: one for role, one in roles.items() if role != "Scheduler"}
    if any(role in ("PS", "Ps", "Evaluator") for role in parts):
        raise source.fail("parameter servers are not translated")
    commands = {tuple(_command_of(_first_container(one["template"]))) for one in parts.values()}
    if len(commands) != 1:
        raise source.fail("its roles have different commands", "give all of them the same one")
    nodes = sum(int(one.get("replicas", 1)) for one in parts.values())
    part = parts.get("Worker") or next(iter(parts.values()))
    return _make_job(source, part["template"], nodes, _read_count(spec.get("nprocPerNode")))


def _read_mpi_job(source: _Source) -> ForeignJob:
    roles = source.spec["mpiReplicaSpecs"]
    launcher = _first_container(roles["Launcher"]["template"])
    worker = roles["Worker"]
    template = copy.deepcopy(worker["template"])
    container = _first_container(template)
    container["command"] = _command_of(launcher)
    container.pop("args", None)
    nodes = int(worker.get("replicas", 1))
    return _make_job(source, template, nodes, _read_count(source.spec.get("slotsPerWorker")))


def _read_train_job(source: _Source) -> ForeignJob:
    trainer = source.spec.get("trainer") or {}
    if "image" not in trainer or not (trainer.get("command") or trainer.get("args")):
        runtime = (source.spec.get("runtimeRef") or {}).get("name", "its runtime")
        raise source.fail(
            f"image or command are those of {runtime}", "write trainer.image and trainer.command"
        )
    container = {
        "name": "node",
        **{key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer},
    }
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    template = {"spec": {"containers": [container]}}
    devices = _read_count(trainer.get("numProcPerNode"))
    return _make_job(source, template, int(trainer.get("numNodes", 1)), devices)


def _read_count(value: object) -> int | None:
    """Return a number of workers; None for ``auto``, ``gpu`` and ``cpu``."""
    return int(str(value)) if str(value).isdigit() else None


_READERS: Mapping[str, Callable[[_Source], ForeignJob]] = {
    "PyTorchJob": _read_replicas,
    "MSJob": _read_replicas,
    "AscendJob": _read_replicas,
    "MPIJob": _read_mpi_job,
    "TrainJob": _read_train_job,
}


def _first_container(template: Manifest) -> Manifest:
    container = template["spec"]["containers"][0]
    if not isinstance(container, dict):
        raise TypeError("a container is not a mapping")
    return container


def _command_of(container: Manifest) -> list[str]:
    return [
        str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))
    ]


def _make_job(source: _Source, template: Manifest, nodes: int, devices: int | None) -> ForeignJob:
    container = _first_container(template)
    translation = _translate(source, container)
    overlay = _make_overlay(template)
    own = _first_container(overlay)
    limits = (own.get("resources") or {}).get("limits") or {}
    backend = ""
    for known, resource in (*DEVICE_RESOURCES.items(), *(("npu", one) for one in _OTHER_RESOURCES)):
        if resource in limits:
            backend = known
            count = int(limits[resource])
            if devices not in (None, count):
                raise source.fail(f"{resource} is {count}, but it starts {devices} workers a node")
            devices = count
    words = _drop_place_options(translation.options)
    if not any(word.startswith("/") for word in _command_of(container)):
        words = _drop_options(words, ("--python",))  # found on this machine, not in the image
    words = _drop_options(words, ("--forward",))  # the pods' own variables reach the workers
    if devices is not None:
        words = _drop_options(words, ("--devices",))
    env = [*(own.get("env") or ())]
    env += [{"name": name, "value": text} for name, text in translation.environment.items()]
    own["env"] = [one for one in env if not _PLACE_VARIABLES.fullmatch(str(one.get("name")))]
    if not own["env"]:
        del own["env"]
    metadata = source.body.get("metadata") or {}
    return ForeignJob(
        kind=source.kind,
        name=str(metadata.get("name") or ""),
        namespace=str(metadata.get("namespace") or ""),
        image=str(container.get("image") or ""),
        nodes=nodes,
        devices=devices,
        backend=backend,
        words=(*words, *translation.program),
        overlay=overlay,
        notes=tuple(translation.notes),
    )


def _translate(source: _Source, container: Manifest) -> Translation:
    """Translate the command of a pod: a launcher's, or a program that each node starts once."""
    command = _command_of(container)
    words = _unwrap_shell(source, command)
    is_shell = words != command
    if not words:
        raise source.fail("its container has no command", "pdrun does not read the image's own")
    kept: list[str] = []
    skip = False
    for index, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, value = word.partition("=")
        following = value if equals else (words[index + 1] if index + 1 < len(words) else "")
        if _PLACE_OPTIONS.fullmatch(name) and "$" in following:
            skip = not equals  # $(MASTER_ADDR): the operator's own variables
            continue
        kept.append(word)
    variables = {str(one.get("name")) for one in container.get("env") or ()}
    kept = [_keep_variables(source, word, variables, is_shell=is_shell) for word in kept]
    try:
        if _starts_launcher(kept):
            return translate_command_line(kept, {})
        translation = Translation(source.kind)
        translation.set_command(kept)
        return translation
    except PdrunError as error:
        raise source.fail(f"{shlex.join(kept)[:200]}: {error}") from None


def _keep_variables(
    source: _Source, word: str, variables: Collection[str], *, is_shell: bool
) -> str:
    """
    Return a word in which Kubernetes itself puts in the variables: ``$(NAME)``.

    Raises:
        ConfigError: the old operator, the image or a shell would have set the variable.
    """

    def convert(match: re.Match[str]) -> str:
        name = next(group for group in match.groups() if group)
        if name not in variables or _PLACE_VARIABLES.fullmatch(name):
            raise source.fail(
                f"{word[:100]} in its command uses the variable {name}, which its env does not set",
                "write the value, or a script of the image that reads the variable",
            )
        return f"$({name})"

    return (_ANY_VARIABLE if is_shell else _KUBERNETES_VARIABLE).sub(convert, word)


def _starts_launcher(words: Sequence[str]) -> bool:
    """Return whether the program is a launcher, called by name or as a module of Python."""
    if is_launcher(words[0]):
        return True
    try:
        translate_command_line(words, {})
    except PdrunError:
        return False
    return True


def _unwrap_shell(source: _Source, words: list[str]) -> list[str]:
    """Return the command of ``sh -c 'COMMAND'``."""
    if not words or words[0] not in SHELLS:
        return words
    options = [word for word in words[1:-1] if word.startswith("-")]
    if len(words) < 3 or len(options) != len(words) - 2 or not options[-1].endswith("c"):
        return words
    text = re.sub(r"\\\n", " ", words[-1]).strip()
    if _SHELL_SYNTAX.search(_ANY_VARIABLE.sub("", text)):
        raise source.fail(
            f"its command is a shell script: {quote_text(text[:120])}",
            "write it as a script of the image, or as one command",
        )
    if "'" in text and "$" in text:  # a shell expands nothing in single quotes
        raise source.fail(
            f"its command has quotes and variables of a shell: {quote_text(text[:120])}",
            "write it as a list of words",
        )
    return shlex.split(text)


def _drop_place_options(options: Sequence[str]) -> list[str]:
    return _drop_options(
        options,
        ("--nodes", "--node-rank", "--scheduler", "--job", "--hosts", "--hostfile", "--launcher"),
    )


def _drop_options(options: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return translated options without some: each of these has a value."""
    kept: list[str] = []
    rest = list(options)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not equals and rest:
            rest.pop(0)
    return kept


def _make_overlay(template: Manifest) -> Manifest:
    """Return what a template has beside what pdrun sets, its first container as pdrun's own."""
    overlay: dict[str, Any] = copy.deepcopy(template)
    spec = overlay["spec"]
    for key in ("restartPolicy", "subdomain", "hostname", "terminationGracePeriodSeconds"):
        spec.pop(key, None)
    container = spec["containers"][0]
    container["name"] = CONTAINER_NAME
    for key in ("command", "args", "image", "ports"):
        container.pop(key, None)
    metadata = overlay.get("metadata") or {}
    kept = {key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)}
    overlay.pop("metadata", None)
    if kept:
        overlay["metadata"] = kept
    return {key: overlay[key] for key in ("metadata", "spec") if key in overlay}
