"""The use of the devices: FLOPs of a step against the peak, for every way of cutting a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdrun
from pdrun.errors import ConfigError
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES, find_device_peaks
from pdrun.parallel.report.device_peak import PEAK_VARIABLE, find_peak
from pdrun.parallel.report.utilization import StepUtilization, count_step_flops
from tests.lib.rank_pool import Worlds

ROWS, TOKENS, WIDTH, LAYERS, CLASSES = 8, 6, 16, 2, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return x + self.down(F.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.emb(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def mean_loss(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(output, batch[1], reduction="sum"), torch.tensor(float(len(batch[1])))


def count_flops(**options: Any) -> float:
    model = Model()
    run = pdrun.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, **options
    )
    words = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 11
    batch = words, torch.arange(ROWS) % CLASSES
    before = run.step(batch).loss
    counted = count_step_flops(run.state, batch)
    assert run.step(batch).loss < before, "counting changes nothing"
    return counted


# 2 FLOPs per weight and token forward, twice that backward; attention: 2 products, then 5
EXPECTED = (
    6.0 * ROWS * (TOKENS * LAYERS * 8 * WIDTH * WIDTH + WIDTH * CLASSES)
    + 7 * 2.0 * ROWS * TOKENS * TOKENS * WIDTH * LAYERS
)


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer_level": 3, "accumulate": 2}, {"recompute": "full"}],
    ids=["plain", "level 3", "recomputed"],
)
def test_flops_of_one_process(options: dict[str, Any]) -> None:
    assert count_flops(**options) == pytest.approx(EXPECTED)


def count_on_ranks(kind: str) -> float:
    return count_flops(
        **{
            "dp": {"accumulate": 2},
            "pp": {"mesh": pdrun.mesh(pp=2), "pipeline": pdrun.Pipeline(microbatches=2)},
            "tp": {
                "mesh": pdrun.mesh(tp=2),
                "strategy": pdrun.Strategy(
                    {"layers.*.up": pdrun.col("tp"), "layers.*.down": pdrun.row("tp")}
                ),
            },
        }[kind]
    )


@pytest.mark.parametrize("kind", ["dp", "pp", "tp"])
def test_ranks_count_the_model_once(kind: str, worlds: Worlds) -> None:
    assert worlds(2).run(count_on_ranks, kind) == [pytest.approx(EXPECTED)] * 2


def test_share_of_the_peak() -> None:
    assert StepUtilization(6e12, 1e13).read_share(2.0) == {"mfu": 0.3}
    assert StepUtilization(0.0, 1e13).read_share(2.0) == {}
    assert StepUtilization(6e12, 0.0).read_share(2.0) == {}
    assert StepUtilization(6e12, 1e13).read_share(None) == {}


@pytest.mark.parametrize(
    ("device", "entry"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10M", ""),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""),
        ("GRID A100-10C", ""),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM2e", "H100 80GB HBM2e"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE"),
        ("Tesla V100S-PCIE-32GB", "V100S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("Ascend910B2", "Ascend910B2"),
        ("Ascend910B5", ""),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40", "L40"),
        ("cpu", ""),
    ],
)
def test_names_of_devices(device: str, entry: str) -> None:
    found = find_device_peaks(device)
    assert (found[0] if found else "") == entry


def fake_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


def test_where_the_peak_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(PEAK_VARIABLE, raising=False)
    assert find_peak("fp32") is None, "a CPU has no entry"
    fake_device(monkeypatch, "NVIDIA H100 80GB HBM3")
    found = find_peak()
    assert found is not None and found.describe() == "989 TFLOP/s bf16"
    assert found.source == "built-in table, H100"
    assert find_peak("fp32").flops == 6.7e13  # type: ignore[union-attr]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-32GB")
    assert find_peak("bf16") is None, "it has no such products"
    assert find_peak().kind == "fp16"  # type: ignore[union-attr]
    topology = BUILTIN_TOPOLOGIES["h200x8"]
    path = tmp_path / "topology.json"
    path.write_text(topology.to_json().replace('"guess": true', '"guess": false'))
    monkeypatch.setenv(PEAK_VARIABLE, str(path))
    found = find_peak("bf16")
    assert found is not None and found.flops == 9.89e14 and "measured" in found.source
    monkeypatch.setenv(PEAK_VARIABLE, "h200x8")
    assert "data sheet" in find_peak("bf16").source  # type: ignore[union-attr]
    monkeypatch.setenv(PEAK_VARIABLE, "1.5e14")
    found = find_peak("bf16")
    assert found is not None and (found.flops, found.source) == (
        1.5e14,
        f"variable {PEAK_VARIABLE}",
    )


def test_a_measured_topology_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    fake_device(monkeypatch, "NVIDIA H100 80GB HBM3")
    guess = BUILTIN_TOPOLOGIES["a100x8"]
    assert find_peak("bf16", guess).source == "built-in table, H100"  # type: ignore[union-attr]
    measured = find_peak("bf16", replace(guess, is_guess=False))
    assert measured is not None and measured.flops == 3.12e14 and "measured" in measured.source


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", "no/such.json"])
def test_what_is_no_peak(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEAK_VARIABLE, text)
    with pytest.raises(ConfigError):
        find_peak()
