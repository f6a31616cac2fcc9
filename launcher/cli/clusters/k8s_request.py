"""
A command line of ``pdrun k8s render`` and ``submit``: options for Kubernetes, anywhere between
those of ``pdrun run``, and the script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.cli.options import complete_names
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.common import parsers
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.k8s import manifest, overlay
from pdrun.launcher.k8s import options as k8s_options
from pdrun.launcher.k8s.pod import Manifest

if TYPE_CHECKING:
    from pdrun.launcher.k8s.foreign import ForeignJob

_RUN_ROWS = {name: row for row in (*RUN_OPTIONS, *ALIAS_OPTIONS) for name in row.names}
"""Spelling -> option of ``pdrun run``."""


@dataclass(frozen=True)
class ManifestOption:
    """An option of ``render`` and ``submit``."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str, str], Any]
    is_repeated: bool = False


MANIFEST_OPTIONS = (
    ManifestOption("--image", "IMAGE", "Image with pdrun and the script.", k8s_options.parse_image),
    ManifestOption(
        "--kind",
        "|".join(k8s_options.KINDS),
        "Kind of job; job needs nothing but Kubernetes 1.24.",
        k8s_options.parse_kind,
    ),
    ManifestOption("--name", "NAME", "Name of the job's objects.", k8s_options.parse_name),
    ManifestOption("--namespace", "NAME", "Namespace.", k8s_options.parse_namespace),
    ManifestOption("--context", "NAME", "Context of kubectl.", parsers.parse_text),
    ManifestOption(
        "--volume", "CLAIM:/PATH[:ro]", "Mount a claim.", k8s_options.parse_volume, is_repeated=True
    ),
    ManifestOption(
        "--limit",
        "RESOURCE=N",
        "Limit and request of a pod: cpu=8, memory=64Gi.",
        k8s_options.parse_limit,
        is_repeated=True,
    ),
    ManifestOption(
        "--label",
        "KEY=VALUE",
        "Label of every object, for queues and accounting.",
        k8s_options.parse_label,
        is_repeated=True,
    ),
    ManifestOption(
        "--from",
        "FILE",
        "Job of another operator to take over: PyTorchJob, MSJob, AscendJob, MPIJob, TrainJob.",
        parsers.parse_path,
    ),
    ManifestOption("--pod", "FILE", "YAML that is merged into the pods.", parsers.parse_path),
    ManifestOption(
        "--secret", "NAME", "Secret with the key 'token'.", k8s_options.parse_object_name
    ),
    ManifestOption(
        "--scheduler-pod",
        "CLAIM:/PATH",
        "Run the scheduler in a separate pod, with its journal on a claim.",
        k8s_options.parse_volume,
    ),
    ManifestOption("--shm", "SIZE", "Size limit of /dev/shm.", k8s_options.parse_quantity),
    ManifestOption(
        "--ttl", "SECONDS", "Delete the job so long after its end.", parsers.int_parser(0)
    ),
)
"""They may stand anywhere before the script, between pdrun's own."""


@dataclass(frozen=True)
class SubmitRequest:
    """A parsed command line of ``render`` or ``submit``."""

    resolved: ResolvedSpec
    words: tuple[str, ...]
    options: k8s_options.KubernetesOptions
    context: str = ""
    overlay: Manifest = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def make_manifests(self, token: str) -> list[Manifest]:
        """Return the job's objects."""
        return manifest.make_manifests(
            self.resolved, self.words, self.options, token, self.overlay or None
        )


def split_words(words: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """
    Return the values of `MANIFEST_OPTIONS`, and the words of ``pdrun run``.

    Raises:
        UsageError: an option lacks its value, or a value is wrong.
    """
    own = {row.name: row for row in MANIFEST_OPTIONS}
    values: dict[str, list[Any]] = {}
    rest: list[str] = []
    queue = complete_names(words, (*RUN_OPTIONS, *ALIAS_OPTIONS))
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name in own:
            if not equals and not queue:
                raise UsageError("needs a value", where=name, hint=own[name].metavar)
            values.setdefault(name, []).append(
                own[name].parse(value if equals else queue.pop(0), name)
            )
        elif word in ("-", "--") or not word.startswith("-"):
            rest += [word, *queue]
            break
        else:
            rest.append(word)
            row = _RUN_ROWS.get(name)
            if row is not None and row.metavar and not equals and queue:
                rest.append(queue.pop(0))
    for option in MANIFEST_OPTIONS:
        if len(values.get(option.name, [])) > 1 and not option.is_repeated:
            raise UsageError("is given twice", where=option.name, hint="leave one of them out")
    return values, rest


def read_request(words: Sequence[str]) -> SubmitRequest:
    """
    Read a command line of ``render`` or ``submit``. Reads the overlay.

    Raises:
        PdrunError, click.ClickException: it is wrong.
    """
    values, rest = split_words(words)
    # Kubernetes puts variables into commands: $(NAME), and $$ for a dollar sign
    rest = [word.replace("$", "$$") for word in rest]
    base: Manifest = {}
    notes: tuple[str, ...] = ()
    if "--from" in values:
        from pdrun.launcher.k8s.foreign import read_foreign_job

        job = read_foreign_job(values["--from"][0])
        rest = _add_foreign_words(job, rest)
        base, notes = job.overlay, job.notes
        for option, value in (
            ("--image", job.image),
            ("--name", k8s_options.propose_name(job.name)),
            ("--namespace", job.namespace),
        ):
            if value and option not in values:
                values[option] = [value]
    _refuse_unknown(rest)
    request = parse_arguments(rest)
    if request.dry_run or request.explain:
        raise UsageError("has no meaning here", where="--dry-run", hint="use pdrun k8s render")
    if "--image" not in values:
        raise UsageError("is missing", where="--image", hint="add --image IMAGE")
    _refuse_job_file(request.resolved)
    first = {name: found[0] for name, found in values.items()}
    options = k8s_options.KubernetesOptions(
        image=first["--image"],
        kind=first.get("--kind", "job"),
        name=first.get("--name", ""),
        namespace=first.get("--namespace", ""),
        volumes=tuple(values.get("--volume", ())),
        limits=tuple(values.get("--limit", ())),
        labels=tuple(values.get("--label", ())),
        secret=first.get("--secret", ""),
        shm=first.get("--shm", ""),
        scheduler=first.get("--scheduler-pod"),
        ttl=first.get("--ttl"),
    )
    path = first.get("--pod", "")
    if path:
        base = overlay.apply_overlay(base, overlay.read_overlay(path))
    return SubmitRequest(
        request.resolved,
        tuple(rest),
        options,
        first.get("--context", ""),
        base,
        (*request.warnings, *notes),
    )


def _add_foreign_words(job: ForeignJob, words: Sequence[str]) -> list[str]:
    """Return the words of ``pdrun run``: the user's options, then what the job says."""
    given: set[str] = set()
    has_program = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name in ("-", "--") or not name.startswith("-"):
            has_program = True
            break
        row = _RUN_ROWS.get(name)
        if row is not None:
            given.update(row.names)
            if row.metavar and not equals and rest:
                rest.pop(0)
    added: list[str] = []
    for option, value in (
        ("--nodes", str(job.nodes)),
        ("--devices", "" if job.devices is None else str(job.devices)),
        ("--backend", job.backend),
    ):
        if value and option not in given:
            added += [option, value]
    return [*added, *words] if has_program else [*added, *words, *job.words]


def _refuse_unknown(words: Sequence[str]) -> None:
    """Refuse an option that neither knows, with a hint at both."""
    own = [row.name for row in MANIFEST_OPTIONS]
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("--") or name == "--":
            break
        if name in _RUN_ROWS:
            continue
        hint = did_you_mean(name, [*own, *_RUN_ROWS]) or "see pdrun k8s submit --help"
        raise UsageError(f"no such option {name}", hint=hint)


def _refuse_job_file(resolved: ResolvedSpec) -> None:
    source = resolved.sources.get("program.target", "")
    name = source.partition(":")[0]
    if name.endswith((".yaml", ".yml")):
        raise UsageError(
            "job files are not sent to pods", where=name, hint="give its values as options"
        )
