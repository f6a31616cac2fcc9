"""
Frameworks on two ranks without one line of noise on stderr (docs/frameworks.md).

Packages that the tests' environment lacks are looked for in the folder of
PYTEST_PDRUN_FRAMEWORKS as well:

    pip install --target DIR accelerate lightning pytorch-ignite hydra-core wandb mpi4py nbclient ipykernel ray
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass

import pytest

from tests.e2e.conftest import Shell
from tests.lib.tiers import thorough

EXTRA = os.environ.get("PYTEST_PDRUN_FRAMEWORKS", "")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@dataclass(frozen=True)
class Framework:
    """A script, the package that it needs, and what two ranks print."""

    script: str
    package: str = "torch"
    printed: str = "rank 0 of 2|rank 1 of 2"
    options: tuple[str, ...] = ("--devices", "2")
    args: tuple[str, ...] = ()


END = "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"

FRAMEWORKS = {
    "accelerate": Framework(
        """
import os, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).sum())
    optimizer.step()
total = accelerator.gather(torch.tensor([accelerator.process_index + 1.0])).sum()
assert total == 3.0 and accelerator.num_processes == 2, total
accelerator.end_training()
"""
        + END,
        "accelerate",
    ),
    "fabric": Framework(
        """
import logging, os, torch
from lightning.fabric import Fabric
logging.disable(logging.INFO)  # its own lines about the ranks
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
loss = model(torch.randn(8, 4)).sum()
fabric.backward(loss)
optimizer.step()
assert fabric.world_size == 2 and fabric.all_reduce(torch.ones(1), reduce_op="sum") == 2
"""
        + END,
        "lightning",
    ),
    "trainer": Framework(
        """
import logging, os, torch, warnings
import lightning as L
logging.disable(logging.INFO)  # its own lines about the ranks
warnings.filterwarnings("ignore", module="lightning")
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))
assert trainer.world_size == 2
"""
        + END,
        "lightning",
    ),
    "transformers": Framework(
        """
import os, torch
from transformers import Trainer, TrainingArguments, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
ids = torch.randint(0, 32, (8, 8))
data = [{"input_ids": row, "labels": row} for row in ids]
arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True,
                              report_to=[], save_strategy="no", disable_tqdm=True,
                              logging_strategy="no", ddp_find_unused_parameters=False)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
trainer.train()
assert trainer.args.world_size == 2
torch.distributed.destroy_process_group()
"""
        + END,
        "transformers accelerate",
    ),
    "ignite": Framework(
        """
import logging, os, torch
import ignite.distributed as idist
from ignite.engine import Engine
logging.disable(logging.INFO)  # its own lines about the ranks
def train(local_rank):
    model = idist.auto_model(torch.nn.Linear(4, 1))
    engine = Engine(lambda engine, batch: model(batch).sum().item())
    engine.run(torch.randn(4, 2, 4), max_epochs=1)
    assert idist.get_world_size() == 2
with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train)
"""
        + END,
        "ignite",
    ),
    "ray": Framework(
        """
import os, ray
if os.environ["RANK"] == "0":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    assert ray.get(ray.remote(lambda: 41 + 1).remote()) == 42
    ray.shutdown()
"""
        + END,
        "ray",
    ),
    "hydra": Framework(
        """
import os, hydra
from omegaconf import DictConfig
@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    assert config.lr == 0.5
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
main()
""",
        "hydra",
        args=("+lr=0.5", "hydra.run.dir=."),
    ),
    "wandb": Framework(
        """
import os, wandb
run = wandb.init(project="test", mode="offline", group="job")
run.log({"loss": 1.0})
run.finish()
"""
        + END,
        "wandb",
    ),
    "mpi4py": Framework(
        """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
assert world.size == 1, world.size  # workers of pdrun are no tasks of an MPI
"""
        + END,
        "mpi4py",
    ),
    "checkpoint": Framework(
        """
import os, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
state = {"weight": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
dcp.save(state, checkpoint_id="saved")
state = {"weight": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
dcp.load(state, checkpoint_id="saved")
assert state["weight"].full_tensor().sum() == 28
dist.destroy_process_group()
"""
        + END
    ),
    "rpc": Framework(
        """
import os, torch, warnings
import torch.distributed.rpc as rpc
warnings.simplefilter("ignore")  # rpc uses what torch has deprecated
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)) == 2
rpc.shutdown()
"""
        + END
    ),
    "loaders": Framework(
        """
import os, torch
from torch.utils.data import DataLoader
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context=method)
        assert sum(int(batch.sum()) for batch in loader) == 28
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""
    ),
    "spawn": Framework(
        """
import os, torch
import torch.multiprocessing as mp
import torch.distributed as dist
def run(local, rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}{rank}", rank=local, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(run, (os.environ["RANK"], os.path.abspath("meeting")), nprocs=2)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""
    ),
    "xdist": Framework(
        "import os\ndef test_rank(): assert os.environ['WORLD_SIZE'] == '2'\n",
        "xdist",
        printed="1 passed",
        options=("--devices", "2", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"),
    ),
    "notebook": Framework(
        """
import os, nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
if os.environ["RANK"] == "0":
    cell = "import torch, os; print(torch.ones(2).sum().item(), os.environ['WORLD_SIZE'])"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc")
    NotebookClient(book, timeout=120, km=kernel).execute()
    assert book.cells[0].outputs[0].text == "2.0 2\\n", book.cells[0].outputs
"""
        + END,
        "nbclient ipykernel",
    ),
}
"""Name -> framework."""
DEFAULT = ("checkpoint",)
"""The others are in the thorough run."""


def missing_packages(names: str) -> list[str]:
    """Return the packages that the workers' interpreter would not find."""
    path = [*sys.path, EXTRA] if EXTRA else sys.path
    return [
        name
        for name in names.split()
        if importlib.machinery.PathFinder.find_spec(name, path) is None
    ]


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else thorough(name) for name in FRAMEWORKS]
)
def test_two_ranks_without_noise(shell: Shell, name: str) -> None:
    framework = FRAMEWORKS[name]
    if missing := missing_packages(framework.package):
        pytest.skip(f"not installed: {', '.join(missing)} (see PYTEST_PDRUN_FRAMEWORKS)")
    (shell.folder / "test_work.py").write_text(framework.script)
    env = {**OFFLINE, **({"PYTHONPATH": EXTRA} if EXTRA else {})}
    code, out, err = shell.run(
        *framework.options, "test_work.py", *framework.args, timeout=300, env=env
    )
    assert code == 0, out + err
    noise = [line for line in err.splitlines() if not line.startswith("pdrun: ")]
    assert noise == []
    lines = "\n".join(line.partition("| ")[2] for line in out.splitlines())
    for part in framework.printed.split("|"):
        assert part in lines, out
    own = [line for line in err.splitlines() if "--start exec" in line or "warning" in line]
    assert own == []
