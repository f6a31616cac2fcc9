"""Manifests for other operators, against the definitions of their objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.launcher.k8s import golden
from tests.lib.kube.definitions import read_schemas

jsonschema = pytest.importorskip("jsonschema")  # of kubernetes-validate

SCHEMAS = read_schemas()
OWN_GROUPS = ("v1", "batch/v1", "pdrun.dev/v1")


def find_mistakes(body: dict[str, Any]) -> list[str]:
    """Return what is wrong with an object of another operator, as its server would."""
    schema = SCHEMAS[f"{body['kind']} {body['apiVersion']}"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(body)
    return [f"{error.json_path}: {error.message}" for error in errors]


def read_foreign_objects() -> dict[str, dict[str, Any]]:
    """Return the last object of each case that is of another operator."""
    made = {name: golden.make_case(words)[-1] for name, words in golden.read_cases().items()}
    return {name: body for name, body in made.items() if body["apiVersion"] not in OWN_GROUPS}


def test_manifests_follow_the_definitions() -> None:
    objects = read_foreign_objects()
    assert {body["kind"] for body in objects.values()} == {
        "JobSet",
        "LeaderWorkerSet",
        "Job",
        "PyTorchJob",
    }
    for name, body in objects.items():
        assert find_mistakes(body) == [], name
        # with what an option adds
        words = golden.read_cases()[name]
        if body["kind"] != "LeaderWorkerSet":
            assert find_mistakes(golden.make_case(["--ttl", "60", *words])[-1]) == [], name


@pytest.mark.parametrize(
    ("case", "path", "value", "message"),
    [
        ("jobset", ("network", "enableDnsHostnames"), True, "'enableDnsHostnames' was unexpected"),
        ("jobset", ("failurePolicy", "maxRestarts"), "0", "'0' is not of type 'integer'"),
        ("jobset", ("replicatedJobs", 0, "template"), None, "None is not of type 'object'"),
        ("lws", ("leaderWorkerTemplate", "restartPolicy"), "Never", "'Never' is not one of"),
        ("lws", ("leaderWorkerTemplate", "workerTemplates"), {}, "was unexpected"),
        ("volcano", ("policies", 0, "event"), "PodDied", "'PodDied' is not one of"),
        ("volcano", ("plugins", "svc"), "", "'' is not of type 'array'"),
        ("volcano", ("tasks",), [], "[] should be non-empty"),
        ("pytorchjob", ("runPolicy", "cleanPodPolicy"), "Never", "'Never' is not one of"),
        ("pytorchjob", ("pytorchReplicaSpecs", "Worker", "replica"), 2, "was unexpected"),
    ],
)
def test_a_mistake_would_be_found(
    case: str, path: tuple[str | int, ...], value: object, message: str
) -> None:
    body = copy.deepcopy(read_foreign_objects()[case])
    part: Any = body["spec"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert any(message in mistake for mistake in find_mistakes(body)), find_mistakes(body)
