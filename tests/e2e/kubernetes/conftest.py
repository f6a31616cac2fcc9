"""A real API server of Kubernetes, with a kubelet and an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdrun.launcher.k8s.operator.loop import OperatorLoop
from tests.lib.kube.cluster import KubeCluster
from tests.lib.kube.operator import install_operator, run_operator
from tests.lib.kube.server import find_programs


@pytest.fixture(scope="package")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """
    A real API server with a kubelet for tests; skips where its programs are missing.

    It ends with the last test of this folder: at rest it takes some percent of a CPU.
    """
    find_programs()
    made = KubeCluster(tmp_path_factory.mktemp("kube"))
    with ExitStack() as started:
        started.callback(made.server.stop)
        made.server.start()
        made.kubelet.start()
        started.callback(made.kubelet.stop)
        yield made


@pytest.fixture(scope="package")
def installed(kube: KubeCluster) -> KubeCluster:
    """The cluster with the operator's definition and roles."""
    install_operator(kube)
    return kube


@pytest.fixture
def operator(installed: KubeCluster) -> Iterator[OperatorLoop]:
    """A running operator, with the rights of its role."""
    with run_operator(installed) as loop:
        yield loop
