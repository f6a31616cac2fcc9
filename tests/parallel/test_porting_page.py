"""The two ports of docs/porting.md that have no example program: they run, on any ranks alike."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, RandomSampler

import pdrun
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
RANK_IMPORTS = ("transformers.models.gpt2.modeling_gpt2",) if HAS_TRANSFORMERS else ()
PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
WORDS, BLOCK, ROWS = 32, 8, 2


def read_port(title: str) -> str:
    """Return the program of a section after the port: added and unchanged lines."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n", 1)[1]
    diff = section.split("```diff\n", 1)[1].split("\n```", 1)[0]
    lines = [line[1:] for line in diff.split("\n") if line[:1] in ("+", " ")]
    return "\n".join(lines)


class Config:
    """The sizes of a model."""

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size


class SmallGPT(nn.Module):
    """A model with the interface of nanoGPT's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, 16),
                "wpe": nn.Embedding(config.block_size, 16),
                "h": nn.ModuleList([layer, type(layer)(16, 2, 32, 0.0, batch_first=True)]),
            }
        )
        self.lm_head = nn.Linear(16, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](places)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.transformer["h"]:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: Any, device_type: str
    ) -> torch.optim.Optimizer:
        decayed = [param for param in self.parameters() if param.dim() >= 2]
        others = [param for param in self.parameters() if param.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def run_nanogpt(folder: str, out: str) -> tuple[int, list[float], float]:
    """Run the port; return the steps, the losses and the sum of all weights."""
    losses: list[float] = []
    names: dict[str, Any] = {
        "np": np,
        "os": os,
        "torch": torch,
        "pdrun": pdrun,
        "Dataset": Dataset,
        "RandomSampler": RandomSampler,
        "LambdaLR": LambdaLR,
        "GPT": SmallGPT,
        "GPTConfig": Config,
        "model_args": {"block_size": BLOCK, "vocab_size": WORDS},
        "data_dir": folder,
        "out_dir": out,
        "block_size": BLOCK,
        "batch_size": ROWS,
        "gradient_accumulation_steps": 4,
        "eval_interval": 3,
        "eval_iters": 2,
        "weight_decay": 0.1,
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "grad_clip": 1.0,
        "dtype": "float32",
        "compile": False,
        "log_interval": 1,
        "max_iters": 5,
        "get_lr": lambda step: 1e-2 / (1 + step),
    }
    names["print"] = lambda text: losses.append(float(text.rsplit(" ", 1)[1]))
    exec(compile(read_port("A nanoGPT-like loop"), "port", "exec"), names)  # noqa: S102
    run = names["run"]
    return run.steps, losses, float(sum(w.sum() for w in run.full_weights().values()))


def test_the_port_of_nanogpt_runs(worlds: Worlds, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    for split in ("train", "val"):
        dice.integers(0, WORDS, 400).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    (steps, one, total), *_ = worlds(1).run(run_nanogpt, str(tmp_path), str(tmp_path / "one"))
    two = worlds(2).run(run_nanogpt, str(tmp_path), str(tmp_path / "two"))
    assert steps == 6
    assert len(one) == 6
    assert math.isfinite(total)
    assert two[0][1] == one
    assert [found[2] for found in two] == pytest.approx([total] * 2, rel=1e-5)
    assert list((tmp_path / "two").glob("step-*"))


def make_causal_model(name: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=BLOCK, n_embd=16, n_layer=2, n_head=2, **rates)
    )


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch whose rows have different numbers of labels."""
    length = max(map(len, rows))
    ids = torch.stack([F.pad(row, (0, length - len(row))) for row in rows])
    ends = torch.tensor([[len(row)] for row in rows])
    mask = (torch.arange(length) < ends).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def run_fine_tuning(folder: str) -> tuple[list[float], list[str]]:
    """Run the port; return what it prints and the files that it has saved."""
    from transformers import get_linear_schedule_with_warmup

    os.chdir(folder)
    dice = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(
            WORDS, (int(torch.randint(3, BLOCK + 1, (), generator=dice)),), generator=dice
        )
        for _ in range(96)
    ]
    losses: list[float] = []
    names: dict[str, Any] = {
        "torch": torch,
        "pdrun": pdrun,
        "name": "small",
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda name: None),
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=make_causal_model),
        "get_linear_schedule_with_warmup": get_linear_schedule_with_warmup,
        "train_data": rows[:80],
        "eval_data": rows[80:],
        "collate": collate,
        "epochs": 2,
        "print": lambda epoch, loss: losses.append(loss),
    }
    exec(compile(read_port("A fine-tuning loop"), "port", "exec"), names)  # noqa: S102
    return losses, sorted(str(path) for path in Path("out").glob("*/model.safetensors"))


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_the_port_of_a_fine_tuning_loop_runs(worlds: Worlds, tmp_path: Path) -> None:
    (losses, files), (others, _) = worlds(2).run(run_fine_tuning, str(tmp_path))
    assert len(losses) == 2
    assert others == []
    assert all(2.0 < loss < 5.0 for loss in losses)
    assert files == ["out/0/model.safetensors", "out/1/model.safetensors"]
