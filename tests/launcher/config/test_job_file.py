"""Job files are read strictly. Every error names file and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.config import job_file
from pdrun.launcher.config.resolve import resolve_spec
from pdrun.launcher.config.spec import JobSpec, list_field_paths
from tests.launcher.cli.conftest import Outcome
from tests.launcher.config.test_aliases import resolve_line

Call = Callable[..., Outcome]
HEAD = "program:\n  script: train.py\n"

BAD = [
    ("", "job.yaml: is empty"),
    ("- a\n", "job.yaml:1: the file must be a mapping of KEY: VALUE lines"),
    ("resources: 3\n", "job.yaml:1: resources must be a mapping of KEY: VALUE lines"),
    (
        HEAD + "resources:\n  nodez: 2\n",
        "job.yaml:4: unknown key 'nodez' in resources; did you mean 'nodes'?",
    ),
    (HEAD + "nodes: 2\n", "job.yaml:3: unknown key 'nodes'; it belongs to resources"),
    (
        HEAD + "resources:\n  nodes: 2\n  nodes: 2\n",
        "job.yaml:5: 'nodes' is set twice; first on line 4",
    ),
    (HEAD + "program:\n  script: x.py\n", "job.yaml:3: 'program' is set twice"),
    (
        HEAD + "resources:\n  nodes: no\n",
        "job.yaml:4: nodes: YAML reads no as true or false; quote it: 'no'",
    ),
    (HEAD + "job: no\n", "job.yaml:3: job: YAML reads no as true or false"),
    (
        HEAD + "job: 22:30\n",
        "job.yaml:3: job: YAML reads 22:30 as another number; quote it: '22:30'",
    ),
    (HEAD + "resources:\n  nodes: 010\n", "job.yaml:4: nodes: YAML reads 010 as another number"),
    (HEAD + "resources:\n  nodes: 0x10\n", "job.yaml:4: nodes: YAML reads 0x10 as another number"),
    (HEAD + "resources:\n  nodes: 1_0\n", "job.yaml:4: nodes: YAML reads 1_0 as another number"),
    (HEAD + "resources:\n  nodes: 0o17\n", "job.yaml:4: '0o17' is not a whole number"),
    (HEAD + "resources:\n  nodes: 1e3\n", "job.yaml:4: '1e3' is not a whole number"),
    (HEAD + "resources:\n  nodes: 2.0\n", "job.yaml:4: '2.0' is not a whole number"),
    (HEAD + "resources:\n  nodes: 0\n", "job.yaml:4: '0' is below 1"),
    (HEAD + "resources:\n  nodes: [2]\n", "job.yaml:4: nodes must be one value"),
    (HEAD + "resources:\n  nodes:\n", "job.yaml:4: nodes has no value"),
    (HEAD + "job: 2026-01-01\n", "job.yaml:3: job: YAML reads 2026-01-01 as a timestamp"),
    (HEAD + "place:\n  local: yes\n", "job.yaml:4: local must be true or false, got 'yes'"),
    (HEAD + "place:\n  local: 1\n", "job.yaml:4: must be true or false, got '1'"),
    (HEAD + "place:\n  insecure: true\n", "job.yaml:4: insecure must be set on the command line"),
    (HEAD + "place:\n  scheduler: host\n", "job.yaml:4: 'host' has no port"),
    (HEAD + "policy:\n  grace: .inf\n", "job.yaml:4: grace: YAML reads .inf as another number"),
    (HEAD + "env: [A=1]\n", "job.yaml:3: env must be a mapping of KEY: VALUE lines"),
    (HEAD + "env:\n  A-B: x\n", "job.yaml:4: 'A-B' is not a variable's name"),
    (HEAD + "env:\n  A=B: x\n", "job.yaml:4: 'A=B' is not the name of a variable"),
    (HEAD + "env:\n  A: on\n", "job.yaml:4: A: YAML reads on as true or false"),
    ("program:\n  script: a.py\n  module: b\n", "contradicts"),
    ("program:\n  script: a.py\n  args: --lr 3\n", "job.yaml:3: args must be a list"),
    ("program:\n  script: a.py\n  args: [[x]]\n", "job.yaml:3: an argument must be one value"),
    ("program:\n  kind: script\n", "job.yaml:2: kind is derived from the key"),
    ("program: !!python/object/apply:os.system [ls]\n", "job.yaml:1: tag"),
    ("program: !script x\n", "job.yaml:1: tag '!script' is not allowed"),
    ("job: &a x\n", "job.yaml:1: anchors and aliases"),
    ("&a [*a]\n", "job.yaml:1: anchors and aliases"),
    ("a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n", "job.yaml:1: anchors and aliases"),
    ("base: &b {nodes: 2}\nresources:\n  <<: *b\n", "job.yaml:1: anchors and aliases"),
    (HEAD + "resources:\n  <<: {nodes: 2}\n", "job.yaml:4: unknown key '<<' in resources"),
    (HEAD + "---\njob: x\n", "job.yaml:3: must have one document, got a second one"),
    ("job: " + "[" * 2000 + "]" * 2000, "job.yaml:1: is nested too deeply or too large"),
    ("job: [" + "x, " * 30000 + "x]\n", "job.yaml:1: is nested too deeply or too large"),
    ("program:\n\tscript: a.py\n", "job.yaml:2: tabs are not allowed"),
    ("program: [a\n", "is not YAML"),
    ("{: : :\n", "is not YAML"),
    ("job: \x07\n", "is not YAML"),
    ("? [a]\n: b\n", "a key must be text"),
    ("job: x\n", "no program to run"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_refused_with_its_line(
    pdrun: Call, folder: Path, text: str, message: str
) -> None:
    (folder / "job.yaml").write_text(text)
    outcome = pdrun("run", "job.yaml")
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert message in outcome.err
    assert outcome.code == (2 if message == "no program to run" else 78)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"job: x\0\n", "contains NUL bytes or is UTF-16"),
        ("job: x\n".encode("utf-16"), "contains NUL bytes or is UTF-16"),
        (b"a: b\njob: \xff\n", "job.yaml:2: is not UTF-8"),
        (b"#" * (job_file.MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_files_that_are_not_text_are_refused(
    pdrun: Call, folder: Path, data: bytes, message: str
) -> None:
    (folder / "job.yaml").write_bytes(data)
    outcome = pdrun("job.yaml")
    assert message in outcome.err
    assert outcome.code == 78


def read(folder: Path, text: str | bytes) -> JobSpec:
    path = folder / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return resolve_spec(job_file.load_job_file(str(path))).spec


def test_values_are_the_text_in_the_file(folder: Path) -> None:
    spec = read(
        folder,
        (
            "\ufeffprogram: {module: pkg.train, args: [--lr, 3e-4, 1.0, -5, 'no', \"1e3\"]}\r\n"
            "resources: {nodes: 2, devices: auto}\r\n"
            "policy: {grace: 5, time_limit: 1h30m}\r\n"
            "output: {show_ranks: 0, files: false}\r\n"
            "place: {scheduler: 'node0:29400'}\r\n"
            "env: {A: 1, B: 'yes', C: ''}\r\n"
        ),
    )
    assert spec.program.args == ("--lr", "3e-4", "1.0", "-5", "no", "1e3")
    assert (spec.program.kind, spec.program.target) == ("module", "pkg.train")
    assert (spec.policy.grace, spec.policy.time_limit) == (5.0, 5400.0)
    assert (spec.output.show_ranks, spec.output.files) == ("0", False)
    assert spec.place.scheduler == Endpoint("node0", 29400)
    assert spec.env == {"A": "1", "B": "yes", "C": ""}


def test_the_command_line_overrides_the_file(pdrun: Call, folder: Path) -> None:
    (folder / "job.yaml").write_text(HEAD + "  args: [a]\nresources:\n  nodes: 3\n  devices: 2\n")
    outcome = pdrun("--dry-run", "--explain", "--nodes", "1", "job.yaml", "b", "--nodes", "9")
    assert outcome.code == 0, outcome.err
    assert "train.py a b --nodes 9" in outcome.out
    assert "job.yaml:5 (3) is overridden by --nodes 1" in outcome.out
    assert re.search(r"resources.devices +2 ", outcome.out)
    assert "job.yaml:6" in outcome.out


@pytest.mark.parametrize(
    ("place", "options", "scheduler", "store"),
    [
        ("store: h1:29500", "", "h1:19500", "h1:29500"),
        ("store: h1:29500\n  port_range: 21000-21100", "", "h1:21021", "h1:29500"),
        ("store: h1:29500", "--master-port 30000", "h1:20000", "h1:30000"),
        ("store: h1:29500", "--scheduler h1:7", "h1:7", "h1:29500"),
        ("scheduler: h1:7\n  store: h1:29500", "", "h1:7", "h1:29500"),
        ("scheduler: h1:7", "--master-port 30000", "h1:7", ":30000"),
        ("scheduler: h1:7", "--scheduler h2:9", "h2:9", "None"),
    ],
)
def test_addresses_are_combined_with_those_of_options(
    folder: Path, place: str, options: str, scheduler: str, store: str
) -> None:
    text = HEAD + f"resources:\n  nodes: 2\nplace:\n  {place}\n"
    (folder / "job.yaml").write_text(text)
    found = resolve_line(f"{options} {folder}/job.yaml", {}).spec.place
    assert (str(found.scheduler), str(found.store)) == (scheduler, store)


def test_hosts_of_scheduler_and_store_in_one_file_agree(folder: Path) -> None:
    text = HEAD + "resources:\n  nodes: 2\nplace:\n  scheduler: h1:7\n  store: h2:29500\n"
    (folder / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"job.yaml:7 \(h2:29500\) contradicts job.yaml:6"):
        resolve_line(f"{folder}/job.yaml", {})


def test_the_template_has_every_key(folder: Path) -> None:
    text = (Path(__file__).parents[3] / "templates" / "job.yaml").read_text()
    spec = read(folder, text)
    assert spec.resources == JobSpec(spec.program).resources
    assert spec.policy == JobSpec(spec.program).policy
    assert spec.output == JobSpec(spec.program).output
    for group, keys in job_file.KEY_PARSERS.items():
        for key in keys:
            assert f"{key}:" in text, f"{group}.{key}"
    everything = re.sub(r"(?m)^( *)# (\w+: )", r"\1\2", text)
    assert read(folder, everything).place.scheduler == Endpoint("node0", 29400)


def test_every_field_of_the_specification_has_a_key() -> None:
    keys = {f"{group}.{key}" for group, known in job_file.KEY_PARSERS.items() for key in known}
    apart = {"program.script", "program.module", "program.command", *job_file.FIELD_PATHS}
    keys = (keys - apart) | {"program.args", "env", "place.hosts", *job_file.TOP_LEVEL_PARSERS}
    assert keys | set(job_file.REFUSAL_REASONS) == set(list_field_paths())


def test_a_file_that_cannot_be_opened_names_itself(folder: Path) -> None:
    (folder / "dir.yaml").mkdir()
    for name, words in (("nope.yaml", "no such file"), ("dir.yaml", "is not a regular file")):
        with pytest.raises(Exception, match=words):
            job_file.load_job_file(str(folder / name))


def test_an_error_of_a_parser_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.yaml:3"):
        read(folder, HEAD + "job: a/b\n")
