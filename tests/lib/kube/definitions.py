"""Definitions of the objects of other operators (``definitions.yaml``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
OPEN_MARK = "x-kubernetes-preserve-unknown-fields"


def read_definitions() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinitions."""
    text = Path(__file__).with_suffix(".yaml").read_text()
    return list(yaml.safe_load_all(text))


def read_schemas() -> dict[str, Schema]:
    """Return kind and version, as ``JobSet jobset.x-k8s.io/v1alpha2`` -> its closed schema."""
    schemas = {}
    for body in read_definitions():
        spec, version = body["spec"], body["spec"]["versions"][0]
        schema = close_schema(version["schema"]["openAPIV3Schema"])
        for key in ("apiVersion", "kind", "metadata"):  # every object has them
            schema["properties"][key] = {}
        schemas[f"{spec['names']['kind']} {spec['group']}/{version['name']}"] = schema
    return schemas


def close_schema(schema: Schema) -> Schema:
    """Return a schema as JSON Schema that refuses the fields which it does not name."""
    closed = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if "properties" in closed:
        named = closed["properties"]
        closed["properties"] = {name: close_schema(part) for name, part in named.items()}
        closed["additionalProperties"] = False
    elif "additionalProperties" in closed:
        closed["additionalProperties"] = close_schema(closed["additionalProperties"])
    if "items" in closed:
        closed["items"] = close_schema(closed["items"])
    return closed
