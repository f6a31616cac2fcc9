"""
A model some of whose weights are on parameter servers: what `parallelize(servers=...)` does.

A served weight is no parameter of the model any more. So the engine, the optimizer and checkpoints
of the workers have the other weights only, which are summed over the ranks as without servers.

    dense    a leaf with the weight's values, pulled after each step
    rows     the embedding's forward fetches the rows of each batch (`embedding.py`)
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError, did_you_mean
from pdrun.parallel.servers.client import ServerClient, StepGradient, connect
from pdrun.parallel.servers.embedding import LookupFunction, RowLookup, ServedEmbedding
from pdrun.parallel.servers.links.checked_values import sum_repeated
from pdrun.parallel.servers.rows_ahead import BatchSource, RowsAhead
from pdrun.parallel.servers.settings import SERVED_FOLDER, Mode, ServedWeights, Servers

PARALLELIZE = "pdrun.parallelize"
PLACEHOLDER = "pdrun_no_local_weight"


@dataclass
class _DenseLeaf:
    """A dense weight on servers, and its leaf in the model."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter
    leaf: torch.Tensor
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients by micro-batch."""


class ServedModel:
    """
    The served weights of a model, during a step and between steps.

    Attributes:
        part: number of the micro-batch that computes; -1: it is not part of the step.
    """

    def __init__(self, model: nn.Module, servers: Servers, device: torch.device) -> None:
        self._model = model
        self._servers = servers
        self._device = device
        self._dense: list[_DenseLeaf] = []
        self._served_of: dict[str, ServedWeights] = {}
        """By name of a dense weight."""
        self._embeddings: list[tuple[nn.Module, str, ServedWeights]] = []
        self._params: list[tuple[nn.Module, str, nn.Parameter]] = []
        """What was taken out of the model."""
        self._lookups: list[RowLookup] = []
        self._client: ServerClient | None = None
        self._ahead: RowsAhead | None = None
        self._has_placeholder = False
        self.part = 0
        self._find_weights()

    @property
    def mode(self) -> Mode:
        """When servers use gradients."""
        return self._servers.mode

    @property
    def client(self) -> ServerClient:
        """The connection to the servers."""
        assert self._client is not None
        return self._client

    # ---- taking weights out of the model ------------------------------------

    def _find_weights(self) -> None:
        """
        Find what each glob matches.

        Raises:
            UsageError: a glob matches nothing, or a weight cannot be served.
        """
        names: dict[int, list[str]] = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        taken: set[int] = set()
        for key, served in self._servers.tables.items():
            globs = [glob.strip() for glob in key.split("|")]
            for glob in globs:
                if served.kind == "rows":
                    has_matched = self._match_rows(glob, served, names, taken)
                else:
                    has_matched = self._match_dense(glob, served, names, taken)
                if not has_matched:
                    raise UsageError(
                        f"servers={glob!r} matches no {_KINDS[served.kind]}",
                        where=PARALLELIZE,
                        hint=did_you_mean(glob, self._known_names(served.kind)),
                    )
        unserved = [
            name or "model"
            for name, module in self._model.named_modules()
            if isinstance(module, ServedEmbedding)
            and all(module is not taken_one for taken_one, _, _ in self._embeddings)
        ]
        if unserved:
            what = f"{unserved[0]} is a ServedEmbedding that no glob of servers= matches"
            raise UsageError(what, where=PARALLELIZE, hint="add its name with pdrun.rows()")

    def _known_names(self, kind: str) -> list[str]:
        if kind == "dense":
            return [name for name, _ in self._model.named_parameters()]
        return [name for name, _, _ in self._iter_embeddings()]

    def _iter_embeddings(self) -> Iterator[tuple[str, str, nn.Module]]:
        """Yield (name of the table, name of the module, module)."""
        for name, module in self._model.named_modules():
            if isinstance(module, ServedEmbedding):
                yield module.name, name, module
            elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                yield name, name, module

    def _match_rows(
        self, glob: str, served: ServedWeights, names: dict[int, list[str]], taken: set[int]
    ) -> bool:
        has_matched = False
        for table, name, module in self._iter_embeddings():
            if not (fnmatch.fnmatchcase(table, glob) or fnmatch.fnmatchcase(name, glob)):
                continue
            has_matched = True
            if id(module) in taken:
                continue
            taken.add(id(module))
            if not isinstance(module, ServedEmbedding):
                _check_embedding(name, module, names)
                taken.add(id(module.weight))
            self._embeddings.append((module, table, served))
        return has_matched

    def _match_dense(
        self, glob: str, served: ServedWeights, names: dict[int, list[str]], taken: set[int]
    ) -> bool:
        has_matched = False
        for name, param in self._model.named_parameters():
            if not fnmatch.fnmatchcase(name, glob):
                continue
            has_matched = True
            if id(param) in taken or not param.requires_grad:
                continue
            taken.add(id(param))
            _check_weight(name, param, names)
            owner, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(owner)
            leaf = param.detach().to(self._device, copy=True).requires_grad_()
            self._dense.append(_DenseLeaf(name, module, attribute, param, leaf))
            self._served_of[name] = served
        return has_matched

    def take_weights(self) -> None:
        """Replace served parameters of the model by leaves, and forwards by lookups."""
        for dense in self._dense:
            self._params.append((dense.module, dense.attribute, dense.param))
        for module, _, _ in self._embeddings:
            if isinstance(module, nn.Embedding):
                self._params.append((module, "weight", module.weight))
        for module, attribute, _ in self._params:
            del module._parameters[attribute]
        for dense in self._dense:
            # no parameter: nn.Module keeps other tensors as plain attributes
            object.__setattr__(dense.module, dense.attribute, dense.leaf)
            dense.leaf.register_post_accumulate_grad_hook(self._make_hook(dense))
        if not any(param.requires_grad for param in self._model.parameters()):
            self._has_placeholder = True
            self._model.register_parameter(PLACEHOLDER, nn.Parameter(torch.zeros(1)))

    def _make_hook(self, dense: _DenseLeaf) -> Any:
        def keep_gradient(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            if self.part >= 0:
                known = dense.parts.get(self.part)
                dense.parts[self.part] = leaf.grad if known is None else known.add_(leaf.grad)
            leaf.grad = None

        return keep_gradient

    def restore_weights(self) -> None:
        """Undo `take_weights`: the model did not become part of a run."""
        for module, attribute, param in self._params:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = param
        for module, _, _ in self._embeddings:
            module.__dict__.pop("forward", None)
        self._params.clear()
        if self._has_placeholder:
            del self._model._parameters[PLACEHOLDER]
        if self._client is not None:
            self._client.close()

    def connect_servers(self, seed: int, seconds: float) -> None:
        """Connect, and give the servers the first values of rank 0."""
        self._client = client = connect(str(self.mode), timeout=seconds)
        weights = {id(module): param for module, _, param in self._params}
        known: set[str] = set()
        for module, table, served in self._embeddings:
            if isinstance(module, ServedEmbedding):
                dim, padding = module.dim, None
                if table not in known:
                    client.add_rows(
                        table,
                        served,
                        dim=dim,
                        size=module.rows or 0,
                        keep=module.keep,
                        admit=module.admit,
                        scale=module.scale,
                        seed=seed,
                        device=self._device,
                    )
            else:
                weight = weights[id(module)]
                dim, padding = weight.shape[1], module.padding_idx
                client.add_rows(
                    table,
                    served,
                    dim=dim,
                    size=weight.shape[0],
                    scale=0.0,
                    values=weight,
                    device=self._device,
                )
            known.add(table)
            lookup = LookupFunction(client, table, dim, self._device, self._record, padding)
            object.__setattr__(module, "forward", lookup)
        for dense in self._dense:
            client.add_dense(dense.name, self._served_of[dense.name], dense.param)
        self.pull_weights()

    # ---- a step -------------------------------------------------------------

    def follow_data(self, feed: BatchSource) -> None:
        """Fetch the rows of the feed's next batch ahead, if a table has a cache for them."""
        if any(served.cache for _, _, served in self._embeddings):
            self._ahead = RowsAhead(self.client, feed)

    def _record(
        self, table: str, ids: torch.Tensor, distinct: torch.Tensor, rows: torch.Tensor
    ) -> None:
        if self.part >= 0:
            self._lookups.append(RowLookup(table, self.part, distinct, rows))
            if self._ahead is not None:
                self._ahead.note_lookup(table, ids)

    def begin_step(self) -> None:
        """Forget what an incomplete step, or a comparison, has left."""
        self._lookups.clear()
        for dense in self._dense:
            dense.parts.clear()
            dense.leaf.grad = None

    def end_step(self, divisor: float) -> int:
        """
        Push the gradients of a step, end it, and pull the new weights.

        Args:
            divisor: of all gradients: the loss's global count.

        Returns:
            how many steps of other workers were used since this worker's last one; 0 in sync mode.

        Raises:
            UsageError: a gradient is nan or infinite.
        """
        gradients = []
        for table in dict.fromkeys(table for _, table, _ in self._embeddings):
            lookups = [lookup for lookup in self._lookups if lookup.table == table]
            for part in sorted({lookup.part for lookup in lookups}):
                ids, grads = _join_lookups([one for one in lookups if one.part == part])
                if grads is not None:
                    gradients.append(StepGradient(table, grads, ids, part))
        for dense in self._dense:
            for part, grad in sorted(dense.parts.items()):
                gradients.append(StepGradient(dense.name, grad, part=part))
        self.begin_step()
        if self._ahead is not None:
            self._ahead.end_step()
        passed = self.client.push_step(gradients, divisor=divisor)
        self.pull_weights()
        return 0 if self.mode.name == "sync" else passed

    def pull_weights(self) -> None:
        """Give the leaves the servers' values."""
        with torch.no_grad():
            for dense in self._dense:
                leaf = dense.leaf.detach()
                if leaf.device.type == "cpu" and leaf.is_contiguous():
                    self.client.pull(dense.name, leaf)
                else:
                    leaf.copy_(self.client.pull(dense.name).view(leaf.shape))

    def reload_weights(self) -> None:
        """Give the leaves the servers' values after these were loaded."""
        self.client.clear_caches()
        self.pull_weights()

    # ---- between steps ------------------------------------------------------

    def dense_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the dense weights, by name."""
        return {dense.name: dense.leaf.detach().clone() for dense in self._dense}

    def save(self, folder: Path, later: Path) -> None:
        """Write the tables into a checkpoint's folder, renamed later; one rank calls this."""
        self.client.save(folder / SERVED_FOLDER, later=later / SERVED_FOLDER)

    def load(self, folder: Path) -> None:
        """Read the tables of a checkpoint; one rank calls this, then all pull."""
        self.client.load(folder / SERVED_FOLDER)

    def check_equal_to_one_process(self) -> None:
        """
        Refuse a comparison with one process, which covers the weights that are not served.

        Raises:
            UsageError: gradients are used in the order of their arrival, or all weights are served.
        """
        if self.mode.name != "sync":
            what = f"servers in mode {self.mode} use gradients in the order of their arrival, so "
            what += "the run cannot equal one process"
            raise UsageError(what, where="pdrun.Run.verify", hint='use mode="sync" to compare')
        if self._has_placeholder:
            what = "all weights are on parameter servers, so no gradient is left to compare"
            raise UsageError(what, where="pdrun.Run.verify", hint="serve fewer weights to compare")

    def describe(self) -> str:
        """Return a line for `Run.explain`."""
        rows = list(dict.fromkeys(table for _, table, _ in self._embeddings))
        where = "in this process" if self.client.is_local else f"on {self.client.servers} server(s)"
        text = f"servers: {len(self._dense)} dense weight(s)"
        if rows:
            text += f" and the rows of {', '.join(rows)}"
        return f"{text} {where}, {self.mode}"


_KINDS = {"rows": "embedding", "dense": "weight"}


def _join_lookups(lookups: Sequence[RowLookup]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return sorted, unique ids, and the gradients of a micro-batch; None without one."""
    used = [lookup for lookup in lookups if lookup.rows.grad is not None]
    if not used:
        return torch.empty(0, dtype=torch.int64), None
    if len(used) == 1:
        return used[0].ids, used[0].rows.grad
    ids = torch.cat([lookup.ids for lookup in used])
    return sum_repeated(ids, torch.cat([lookup.rows.grad.to("cpu") for lookup in used]))


def _check_embedding(name: str, module: nn.Module, names: dict[int, list[str]]) -> None:
    """Refuse an embedding whose rows cannot be served."""
    if isinstance(module, nn.EmbeddingBag):
        what = f"{name} is an EmbeddingBag, whose rows cannot be served"
        raise UsageError(what, where=PARALLELIZE, hint="use an Embedding and sum its output")
    if module.max_norm is not None or module.scale_grad_by_freq:
        what = f"{name}: max_norm and scale_grad_by_freq are not supported with served rows"
        raise UsageError(what, where=PARALLELIZE)
    _check_weight(f"{name}.weight", module.weight, names)


def _check_weight(name: str, param: nn.Parameter, names: dict[int, list[str]]) -> None:
    """Refuse a weight that cannot be served."""
    if len(names[id(param)]) > 1:
        what = f"{name} is tied ({' and '.join(names[id(param)])}) and cannot be served"
        raise UsageError(what, where=PARALLELIZE, hint="leave it out of servers=")
    if param.dtype != torch.float32 or param.device.type == "meta":
        kind = str(param.dtype).removeprefix("torch.")
        what = f"{name} must be fp32 with memory to be served, got {kind} on {param.device.type}"
        raise UsageError(what, where=PARALLELIZE)


@contextmanager
def serve_weights(
    model: Any, servers: Servers | None, device: torch.device
) -> Iterator[ServedModel | None]:
    """
    Take the served weights out of a model; inside, an error gives them back.

    Yields None without ``servers``.
    """
    if servers is None or not isinstance(model, nn.Module):
        yield None
        return
    served = ServedModel(model, servers, device)
    served.take_weights()
    try:
        yield served
    except BaseException:
        served.restore_weights()
        raise
