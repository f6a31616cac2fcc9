"""
Trains many architectures under many plans, each compared with plain torch in one process.

    PYTHONPATH=/path/to/packages python benchmarks/model_zoo.py
    python benchmarks/model_zoo.py --only llama,gpt --plan tensor,pipeline
    python benchmarks/model_zoo.py --sample 40
    python benchmarks/model_zoo.py --sample 9999 --json cells.json --resume
    python benchmarks/model_zoo.py --list

Models are small configurations with random weights; nothing is loaded. A library that is not
installed is left out. A cell is three steps on 8, 7 and 5 rows: losses, norms, first gradients and
final weights. Each runs in processes of its own with a time limit.

    =  equal    r  refused with a reason    W  wrong    C  crashed    .  not run
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from zoo_inputs import input_models
from zoo_libraries import adapted_models, image_models
from zoo_models import Architecture
from zoo_others import other_models
from zoo_plain import plain_models
from zoo_plans import PLANS, Trained, applies, train_cell, train_plain
from zoo_transformers import transformers_models

SYMBOLS = {"equal": "=", "refused": "r", "wrong": "W", "crashed": "C"}
CELL_SECONDS = 90.0
GRACE_SECONDS = 5.0
"""How long other ranks may take after the first has failed."""
PRELOADED = (
    "pdrun.parallel.parallelize",
    "pdrun.parallel.report.verify",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.export",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing._internal.distributed.fake_pg",
)
"""What each rank would import: imported once, before the ranks are forked."""
LIBRARIES = ("torch", "transformers", "timm", "torchvision", "diffusers", "peft")


@dataclass(frozen=True)
class CellResult:
    """The outcome of one architecture under one plan."""

    model: str
    plan: str
    outcome: str
    text: str
    seconds: float


def find_architectures(globs: list[str]) -> list[Architecture]:
    """Return the architectures whose libraries are installed and whose names match."""
    known = [*plain_models(), *transformers_models(), *image_models(), *adapted_models()]
    known += [*other_models(), *input_models()]
    return [
        one
        for one in known
        if importlib.util.find_spec(one.library) is not None and _matches(one.name, globs)
    ]


def _matches(name: str, globs: list[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def _join_ranks(rank: int, size: int, folder: str) -> None:
    """Make this process a rank."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )


def _serve_rank(
    architecture: Architecture, plan: str, rank: int, folder: str, reference: str, link: Connection
) -> None:
    """Run a cell's rank and send (outcome, text)."""
    from pdrun import ConfigError, UsageError

    log = os.open(f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _join_ranks(rank, PLANS[plan].size, folder)
        want: Trained = torch.load(reference, weights_only=False)
        link.send(train_cell(architecture, PLANS[plan], want))
    except (UsageError, ConfigError) as error:
        link.send(("refused", str(error)))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        traceback.print_exc()
        link.send(("crashed", f"{type(error).__name__} at {where}: {error}"))
    link.close()
    os._exit(0)  # other ranks may be gone


def _serve_reference(architecture: Architecture, clip: float | None, path: str) -> None:
    torch.save(train_plain(architecture, clip), path)
    os._exit(0)


class CellRunner:
    """Runs cells in processes that are forked from this one, which has imported the libraries."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder = Path(folder)
        self.seconds = seconds
        self.context = multiprocessing.get_context("fork")
        self._references: dict[tuple[str, float | None], str] = {}
        self._built: set[str] = set()

    def run_cell(self, architecture: Architecture, plan: str) -> CellResult:
        """Return the outcome of a cell; its processes have ended."""
        begin = time.monotonic()
        if architecture.name not in self._built:
            try:
                architecture.build()  # imports the library's modules once, before the forks
            except Exception as error:
                text = f"it cannot be built: {type(error).__name__}: {error}"
                return CellResult(architecture.name, plan, "crashed", text, 0.0)
            self._built.add(architecture.name)
        reference = self._reference_of(architecture, PLANS[plan].options.get("clip"))
        if isinstance(reference, CellResult):
            return reference
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            answers = self._run_ranks(architecture, plan, folder, reference)
            outcome, text = judge_answers(answers)
            output = Path(folder) / "output"
            if outcome == "crashed" and output.exists():
                kept = self.folder / f"{architecture.name}.{plan}.txt"
                kept.write_bytes(output.read_bytes())
        return CellResult(
            architecture.name, plan, outcome, text, round(time.monotonic() - begin, 1)
        )

    def _reference_of(self, architecture: Architecture, clip: float | None) -> str | CellResult:
        key = (architecture.name, clip)
        if key not in self._references:
            path = str(self.folder / f"{architecture.name}.{clip}.pt")
            process = self.context.Process(target=_serve_reference, args=(architecture, clip, path))
            process.start()
            process.join(self.seconds)
            if process.is_alive():
                process.kill()
                process.join()
            self._references[key] = path
        if not Path(self._references[key]).exists():
            return CellResult(architecture.name, "plain", "crashed", "plain torch failed", 0.0)
        return self._references[key]

    def _run_ranks(
        self, architecture: Architecture, plan: str, folder: str, reference: str
    ) -> list[tuple[str, str]]:
        """Return (outcome, text) of each rank."""
        links, processes = [], []
        for rank in range(PLANS[plan].size):
            here, there = self.context.Pipe()
            process = self.context.Process(
                target=_serve_rank, args=(architecture, plan, rank, folder, reference, there)
            )
            process.start()
            there.close()
            links.append(here)
            processes.append(process)
        answers: dict[int, tuple[str, str]] = {}
        end = time.monotonic() + self.seconds
        while len(answers) < len(links) and time.monotonic() < end:
            waiting: dict[Any, int] = {
                link: rank for rank, link in enumerate(links) if rank not in answers
            }
            for link in wait(list(waiting), max(0.0, end - time.monotonic())):
                rank = waiting[link]
                try:
                    answers[rank] = links[rank].recv()
                except (EOFError, ConnectionError):
                    answers[rank] = ("crashed", f"rank {rank} ended without an answer")
                if answers[rank][0] in ("crashed", "refused"):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for process in processes:
            if len(answers) < len(links):
                process.kill()
            process.join()
        for link in links:
            link.close()
        unanswered = ("crashed", f"no answer in {self.seconds:.0f} s")
        return [answers.get(rank, unanswered) for rank in range(len(links))]


def judge_answers(answers: list[tuple[str, str]]) -> tuple[str, str]:
    """Return the outcome of a cell: what went wrong first, or that all ranks are equal."""
    outcomes = [outcome for outcome, _ in answers]
    if "refused" in outcomes:
        # a rank that others wait for is enough: they end with it
        return answers[outcomes.index("refused")]
    for outcome in ("wrong", "crashed"):
        if outcome in outcomes:
            return answers[outcomes.index(outcome)]
    return "equal", ""


def read_results(path: Path) -> list[CellResult]:
    """Return the cells that an earlier run has appended to a file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [CellResult(**json.loads(line)) for line in lines]


def print_table(results: list[CellResult], plans: list[str]) -> None:
    """Print a row per architecture, then the counts, then what is not equal."""
    width = max(len(one.model) for one in results)
    print(f"{'':{width}}  " + " ".join(f"{plan:>10}" for plan in plans))
    cells = {(one.model, one.plan): one for one in results}
    for model in dict.fromkeys(one.model for one in results):
        row = [cells.get((model, plan)) for plan in plans]
        marks = (f"{SYMBOLS[one.outcome] if one else '.':>10}" for one in row)
        print(f"{model:{width}}  " + " ".join(marks))
    for plan in plans:
        mine = [one.outcome for one in results if one.plan == plan]
        counts = {outcome: mine.count(outcome) for outcome in SYMBOLS if outcome in mine}
        if mine:
            share = 100.0 * mine.count("equal") / len(mine)
            print(f"{plan:>12}: {share:5.1f} % of {len(mine)} equal; {counts}")
    for one in results:
        if one.outcome in ("refused", "wrong", "crashed"):
            print(f"{one.outcome}: {one.model} {one.plan}: {' '.join(one.text.split())[:500]}")


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--only", default="", help="globs of architectures, with commas")
    parser.add_argument("--plan", default="", help="plans, with commas; default: all")
    parser.add_argument("--sample", type=int, help="number of random cells, the same each time")
    parser.add_argument("--seconds", type=float, default=CELL_SECONDS, help="limit of a cell")
    parser.add_argument("--json", help="file to which each result is appended as a line")
    parser.add_argument("--resume", action="store_true", help="leave out cells that --json has")
    parser.add_argument("--keep", help="folder for the output of cells that crashed")
    parser.add_argument("--list", action="store_true", help="print architectures and plans")
    return parser.parse_args()


def main() -> int:
    """Run the cells; the exit code is 1 if one is wrong or has crashed."""
    options = parse_arguments()
    torch.set_num_threads(1)
    chosen = find_architectures([glob for glob in options.only.split(",") if glob])
    plans = [plan for plan in options.plan.split(",") if plan] or list(PLANS)
    unknown = [plan for plan in plans if plan not in PLANS]
    if unknown or not chosen:
        print(f"no such plan or architecture; plans: {', '.join(PLANS)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{one.name:20} {one.library}" for one in chosen))
        print(f"plans: {', '.join(PLANS)}")
        return 0
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is not None:
            print(f"{library} {importlib.metadata.version(library)}", end="  ")
    print(flush=True)
    for name in (*PRELOADED, *{one.library for one in chosen}):
        importlib.import_module(name)
    cells = [(one, plan) for one in chosen for plan in plans if applies(one, PLANS[plan])]
    if options.sample:  # in random order: a run that is cut is a sample, too
        cells = random.Random(0).sample(cells, min(options.sample, len(cells)))
    results = read_results(Path(options.json)) if options.resume and options.json else []
    known = {(one.model, one.plan) for one in results}
    cells = [(one, plan) for one, plan in cells if (one.name, plan) not in known]
    with tempfile.TemporaryDirectory(prefix="zoo") as folder:
        runner = CellRunner(options.keep or folder, options.seconds)
        for architecture, plan in cells:
            results.append(runner.run_cell(architecture, plan))
            if options.json:
                with Path(options.json).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(results[-1])) + "\n")
    print_table(results, plans)
    return int(any(one.outcome in ("wrong", "crashed") for one in results))


if __name__ == "__main__":
    sys.exit(main())
