"""A run reports its steps to the agent, so that a job shows them; without a measurable cost."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest
import torch

import pdrun
from pdrun import elastic
from pdrun.parallel.training.metrics import Metrics
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch
STEPS = 4


def train_with_agent(folder: str, script_reports: bool) -> tuple[list[dict[str, Any]], int]:
    """Return what an agent gets from this rank, and how often the numbers were read."""
    rank = os.environ["RANK"]
    path = f"{folder}/{rank}-{script_reports}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
        agent.bind(path)
        os.environ["PDRUN_AGENT"] = path
        elastic._instance = None
        is_child, elastic._is_child_process = elastic._is_child_process, lambda: False
        try:  # the ranks of a pool are children of multiprocessing
            run = pdrun.parallelize(zoo.build(), zoo.OPTIMIZERS["SGD"], zoo.token_loss)
            reads = 0
            for step in range(STEPS):
                metrics = run.step(zoo.batch_of(8, step))
                reads += not isinstance(metrics._totals, torch.Tensor)
                if script_reports:
                    pdrun.progress(step)
        finally:
            del os.environ["PDRUN_AGENT"]
            elastic._is_child_process = is_child
            elastic._instance = None
        found = []
        while True:
            try:
                found += [one for one in [json.loads(agent.recv(1 << 15))] if "step" in one]
            except BlockingIOError:
                return found, reads


def test_steps_are_reported_at_intervals(worlds: Worlds, tmp_path: Any) -> None:
    for reports, reads in worlds(2).run(train_with_agent, str(tmp_path), False):
        assert reports[0]["step"] == 1
        assert reports[0]["sampled"] is True
        assert reports[0]["numbers"]["loss"] > 1.0
        # a second one if the wall clock has just passed a multiple of 5 s
        assert reads == len(reports) <= 2


def test_a_script_that_reports_is_left_alone(worlds: Worlds, tmp_path: Any) -> None:
    for reports, _ in worlds(2).run(train_with_agent, str(tmp_path), True):
        assert [(one["step"], "sampled" in one) for one in reports[:2]] == [(1, True), (0, False)]
        assert not any(one.get("sampled") for one in reports[1:])


def test_a_step_without_tokens_is_no_error() -> None:
    metrics = Metrics(1, torch.tensor([0.0, 0.0]), None)
    assert str(metrics.read_numbers()["loss"]) == "nan"
