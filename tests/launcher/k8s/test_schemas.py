"""Every manifest of the golden files against the schemas of Kubernetes, as strictly as they go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.launcher.k8s import golden
from tests.lib.tiers import by_tier

kubernetes_validate = pytest.importorskip("kubernetes_validate")

OWN_KINDS = ("v1", "batch/v1")
"""API groups of Kubernetes itself; the others come with definitions of their own."""
VERSIONS = by_tier(["1.37"], [f"1.{minor}" for minor in range(30, 38)])


def read_objects() -> dict[str, list[dict[str, Any]]]:
    return {
        path.stem: [
            body for body in yaml.safe_load_all(path.read_text()) if body["apiVersion"] in OWN_KINDS
        ]
        for path in sorted((golden.FOLDER / "cases").iterdir())
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schemas(version: str) -> None:
    for bodies in read_objects().values():
        for body in bodies:
            kubernetes_validate.validate(body, version, strict=True)


def test_a_mistake_would_be_found() -> None:
    job = read_objects()["two-nodes"][-1]
    for key, value in (("resorces", {}), ("image", 7)):
        wrong = copy.deepcopy(job)
        wrong["spec"]["template"]["spec"]["containers"][0][key] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_pods_of_other_kinds_follow_the_schemas() -> None:
    for name in ("jobset", "lws", "volcano", "pytorchjob", "from-pytorchjob"):
        text = (golden.FOLDER / "cases" / f"{name}.yaml").read_text()
        job = list(yaml.safe_load_all(text))[-1]
        for template in find_templates(job["spec"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
            pod = {**pod, "spec": template["spec"]}
            kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


def find_templates(part: Any) -> list[dict[str, Any]]:
    """Return every pod template in an object."""
    if isinstance(part, list):
        return [found for item in part for found in find_templates(item)]
    if not isinstance(part, dict):
        return []
    if "containers" in part.get("spec", {}):
        return [part]
    return [found for value in part.values() for found in find_templates(value)]
