"""What proves a promise of docs/mindspore.md: ``FILE::TEST``, anywhere in the tests."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROOF_SECONDS = 1200


@functools.cache
def find_tests(path: str) -> frozenset[str]:
    """Return the names of the tests of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def check_proof(proof: str) -> None:
    """Fail if a test is missing."""
    path, _, name = proof.partition("::")
    assert name in find_tests(path), proof


def run_proofs(promises: Mapping[str, Mapping[str, str]]) -> None:
    """Run the tests of a page in a pytest of its own; fail if one fails, or none is run."""
    proofs = dict.fromkeys(proof for section in promises.values() for proof in section.values())
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *proofs],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROOF_SECONDS,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
