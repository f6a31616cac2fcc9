"""Command lines and their manifests, as golden files; command lines that are refused."""

from __future__ import annotations

import os
import shlex
from contextlib import chdir

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import PdrunError
from pdrun.launcher.k8s.manifest import format_manifests
from pdrun.launcher.k8s.options import MAX_LABEL_LENGTH, parse_name, propose_name
from pdrun.launcher.k8s.overlay import apply_overlay
from tests.launcher.k8s import golden

CASES = golden.read_cases()


@pytest.mark.parametrize("name", CASES)
def test_manifests(name: str) -> None:
    text = golden.format_case(CASES[name])
    path = golden.FOLDER / "cases" / f"{name}.yaml"
    if os.environ.get("PDRUN_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in (golden.FOLDER / "cases").iterdir()} == set(CASES)


@pytest.mark.parametrize(("words", "code", "message"), list(golden.read_refusals()))
def test_refused(words: str, code: int, message: str) -> None:
    with pytest.raises(PdrunError) as caught, chdir(golden.FOLDER / "files"):
        golden.make_case(shlex.split(words))
    assert (caught.value.exit_code, str(caught.value)) == (code, message)


@given(st.text(max_size=100))
def test_a_proposed_name_is_accepted(text: str) -> None:
    name = propose_name(text)
    assert name == "" or parse_name(name, "--name") == name
    assert len(name) <= MAX_LABEL_LENGTH


@given(st.lists(st.text(max_size=30), max_size=6))
def test_arguments_of_the_script_arrive_unchanged(args: list[str]) -> None:
    if any("\0" in arg for arg in args):
        return
    job = golden.make_case(["--image", "i", "train.py", *args])[-1]
    text = format_manifests([job])
    command = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]["command"]
    if all(arg.isprintable() for arg in args):
        # Kubernetes makes one dollar sign of two, and puts in variables otherwise
        assert command == ["pdrun", "run", "train.py", *(arg.replace("$", "$$") for arg in args)]


def test_an_overlay_changes_neither_argument() -> None:
    base = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    more = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "2"}]}]}}
    merged = apply_overlay(base, more)
    assert merged["spec"]["containers"][0]["env"] == [{"name": "X", "value": "2"}]
    assert base["spec"]["containers"][0]["env"] == [{"name": "X", "value": "1"}]
    assert more["spec"]["containers"][0]["env"] == [{"name": "X", "value": "2"}]


def test_dollar_signs_of_the_user_are_no_variables() -> None:
    job = golden.make_case(["--image", "i", "train.py", "$(PDRUN_TOKEN)", "a$$b"])[-1]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["$$(PDRUN_TOKEN)", "a$$$$b"]
