"""
A stage of a plain model: the model's own ``forward``, of which only this stage's modules compute.

    modules of earlier stages       return *placeholders*: tensors with a shape and without data
    the stage's first module        takes the received tensors instead of placeholder arguments
    its other modules               compute; known placeholders are replaced by received tensors
    a later stage's first module    ends the forward: the arguments of its call are sent

Nothing is traced and nothing is rewritten: branches, loops and code between modules run unchanged,
and inputs such as masks and positions are part of the batch, on every stage.

Errors are found: a computation on placeholders gives placeholders (torch's fake tensors). A
placeholder that reaches a module of this stage, the loss, or the next stage is an error that names
it. A branch on the value of a placeholder is an error, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.model.copies import copy_attributes
from pdrun.parallel.pipeline.metadata import (
    API_NAME,
    BoundaryRecord,
    SentTensor,
    ValueForm,
    build_value,
    flatten_result,
    form_of,
)
from pdrun.parallel.pipeline.skips import ForwardTrace, ResultKey
from pdrun.parallel.pipeline.split import StageSplit
from pdrun.parallel.pipeline.units import (
    PlaceholderMode,
    RemoteTensor,
    StageUnit,
    has_remote_tensors,
    remote_class,
    stage_class,
)

MAX_LISTED_CALLS = 20
"""Modules that an error lists."""


class GraphModel(Protocol):
    """The ``_pdrun_engine`` of a model whose forward is one graph."""

    def split(self) -> StageSplit | None:
        """
        Return the stage of each module, with the weights of each stage; None: as `split_model`
        does.
        """
        ...

    def enter(self, stages: PipelineStages) -> None:
        """Get the stages: a call of the model runs `run_graph` of the running forward."""
        ...


class StageBoundary(BaseException):
    """
    The forward has reached the next stage's first module.

    Not an Exception, so that no model catches it.
    """


class PipelineStages:
    """
    The stages of a model on this rank.

    Args:
        model: the full model; modules of other stages lose their weights and buffers.
        cut: stages of its modules.
        mine: the stages of this rank.
        device: of the model.
    """

    def __init__(
        self, model: nn.Module, cut: StageSplit, mine: Iterable[int], device: torch.device
    ) -> None:
        self.split = cut
        self.own_stages = tuple(mine)
        self.device = device
        self.fake_mode = PlaceholderMode()
        self.running: StageForward | None = None
        self.trace = ForwardTrace()
        """What the first forward showed on fake tensors."""
        self.trained_weights: dict[int, list[nn.Parameter]] = {
            stage: [] for stage in self.own_stages
        }
        """Weights to train of each stage of this rank."""
        self._check_modules(model)
        first: dict[int, str] = {}
        names: dict[str, str] = {}
        holders: dict[str, set[int]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names[name] = first.setdefault(id(param), name)
            holders.setdefault(names[name], set()).update(cut.holders_of(name))
        for name, stage in cut.unit_stages.items():
            module = model.get_submodule(name)
            module._pdrun_unit = StageUnit(self.find_running, name, stage, self.own_stages)
            module.__class__ = stage_class(type(module))
            if stage in self.trained_weights:
                self.trained_weights[stage] += [
                    param for param in module.parameters() if param.requires_grad
                ]
            else:
                self._drop_module(name, module)
        self._drop_loose_weights(model)
        for module in model.modules():
            if next(module.parameters(), None) is None and has_remote_tensors(module):
                module.__class__ = remote_class(type(module))
        self.own_weights = {
            names[name]: param for name, param in model.named_parameters(remove_duplicate=False)
        }
        """The weights of this rank, by their first name in the full model."""
        self.weight_stages = {
            name: sorted(holders[name] & set(self.own_stages)) for name in self.own_weights
        }
        """The stages of this rank that compute with each weight."""
        self.shared_weights = {
            param for name, param in self.own_weights.items() if len(holders[name]) > 1
        }
        """Weights that several stages have."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineStages:
        """Return itself: a copy of a model runs the same stages."""
        return self

    def _check_modules(self, model: nn.Module) -> None:
        seen: dict[int, str] = {}
        for name in self.split.unit_stages:
            module = model.get_submodule(name)
            if id(module) in seen:
                what = f"{seen[id(module)]} and {name} are the same module, which needs one stage"
                raise UsageError(
                    what, where=API_NAME, hint="stages={...} with a module around both"
                )
            seen[id(module)] = name

    def _drop_module(self, unit: str, module: nn.Module) -> None:
        """
        Remove the weights and buffers of another stage's module, except those that this rank
        shares.
        """
        for inner, each in module.named_modules(remove_duplicate=False):
            prefix = f"{unit}.{inner}." if inner else f"{unit}."
            gone = each.__dict__.setdefault("_pdrun_remote", {})
            for tensors in (each._parameters, each._buffers):
                for own, tensor in list(tensors.items()):
                    if tensor is None or set(self.split.loose_weights.get(prefix + own, ())) & set(
                        self.own_stages
                    ):
                        continue
                    gone[own] = self._make_remote(prefix + own, tensor)
                    del tensors[own]
            if each is not module:
                each.__class__ = remote_class(type(each))

    def _drop_loose_weights(self, model: nn.Module) -> None:
        """Remove weights around the units that no stage of this rank has."""
        for name, stages in self.split.loose_weights.items():
            holder, _, own = name.rpartition(".")
            module = model.get_submodule(holder)
            param = module._parameters.get(own)
            if set(stages) & set(self.own_stages):
                for stage in set(stages) & set(self.own_stages):
                    if param is not None and param.requires_grad:
                        self.trained_weights[stage].append(param)
            elif param is not None:
                gone = module.__dict__.setdefault("_pdrun_remote", {})
                gone[own] = self._make_remote(name, param)
                del module._parameters[own]
                module.__class__ = remote_class(type(module))

    def _make_remote(self, name: str, tensor: torch.Tensor) -> RemoteTensor:
        """Return what a weight or buffer of another stage reads as."""
        placeholder = self.make_placeholder(tuple(tensor.shape), tensor.dtype)
        copy_attributes(tensor, placeholder)
        return RemoteTensor(name, self.find_running, placeholder, isinstance(tensor, nn.Parameter))

    def make_placeholder(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a placeholder."""
        with self.fake_mode:
            return torch.empty(shape, dtype=dtype, device=self.device)

    def find_running(self) -> StageForward | None:
        """Return the forward that runs now; None outside of one."""
        return self.running

    def require_running(self) -> StageForward:
        """
        Return the forward that runs now.

        Raises:
            UsageError: no forward runs.
        """
        if self.running is None:
            what = (
                f"the model is split into {self.split.stage_count} stages, and this rank has"
                f" {list(self.own_stages)}"
            )
            raise UsageError(
                what, where=API_NAME, hint="run.step and run.evaluate run a model in stages"
            )
        return self.running

    def run_forward(
        self, one: StageForward, forward: Callable[[], Any], is_strict: bool = True
    ) -> Any:
        """
        Run the forward of a stage.

        Args:
            is_strict: refuse values of earlier stages in the model's result.

        Returns:
            the model's result on the last stage; None on others, where `StageBoundary` ended it.
        """
        self.running = one
        self.fake_mode.refuses_writes = bool(self.trace.error)
        try:
            with _explain_reads(one.stage, "of the model"):
                output = forward()
        except StageBoundary:
            return None
        finally:
            self.running = None
        one.check_end()
        return one.complete_output(output, is_strict)

    def compute_loss(self, one: StageForward, compute: Callable[[], Any]) -> Any:
        """Return the loss of an output in which values of earlier stages can be placeholders."""
        self.fake_mode.refuses_writes = True
        with _explain_reads(one.stage, "of the loss"):
            return one.complete_output(compute(), True, "the loss")


class StageForward:
    """
    One forward of a stage.

    Args:
        stages: those of this rank.
        stage: which of them.
        batch: of the micro-batch; its tensors are not sent.
        record, tensors: received from the stage before; None and empty on the first.
        entered: called at the start of the stage's own part.

    Attributes:
        outputs: the tensors to send, after the forward.
    """

    def __init__(
        self,
        stages: PipelineStages,
        stage: int,
        batch: Any,
        record: BoundaryRecord | None,
        tensors: list[torch.Tensor],
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self.stages = stages
        self.stage = stage
        self.record = record
        self.tensors = tensors
        self._on_enter = entered
        self._is_inside = False
        self._batch_ids = {
            id(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)
        }
        self._returned: list[tuple[str, ValueForm]] = list(record.returned) if record else []
        self._forms: dict[tuple[str, int], ValueForm] = {}
        calls = Counter[str]()
        for name, form in self._returned:
            self._forms[name, calls[name]] = form
            calls[name] += 1
        self._placeholder_counts = Counter[str]()
        self._replacements: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.remote_reads: list[str] = []
        self.outputs: list[torch.Tensor] = []
        self._next_module = ""
        self._leaf_count = 0
        self._sent = list[SentTensor]()
        self._sent_skips: list[tuple[ResultKey, int]] = []
        self._is_graph = False
        self._call_counts = Counter[str]()
        self._skips: dict[ResultKey, torch.Tensor] = {}
        """Results of this and earlier stages that later ones use."""
        if record is not None:
            self._skips = {key: tensors[slot] for key, slot in record.skips}
        self._own_skips = {
            skip.key for skip in stages.trace.skips if skip.source == stage and skip.last > stage
        }
        self._changed_skips = {skip.key for skip in stages.trace.skips if skip.is_changed}
        self._versions: dict[ResultKey, int] = {}

    def make_record(self, calls: int) -> BoundaryRecord:
        """Return the record for the next stage."""
        return BoundaryRecord(
            self._next_module,
            self._leaf_count,
            tuple(self._sent),
            calls,
            tuple(self._returned),
            tuple(self._sent_skips),
        )

    def note_remote_read(self, name: str) -> None:
        """Note that a weight of another stage was read."""
        self.remote_reads.append(name)

    def call_unit(
        self,
        unit: StageUnit,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what the call of a unit means in this stage."""
        if self._is_graph:  # which has this stage's units called, and no others
            return inner(*args, **kwargs)
        if unit.stage < self.stage:
            return self._placeholder_for(unit)
        args, kwargs = self._enter_stage(unit, args, kwargs)
        if unit.stage > self.stage:
            self._leave_stage(unit, args, kwargs)
        output = inner(*args, **kwargs)
        self._returned.append((unit.name, form_of(output, unit.name)))
        if self._own_skips:
            self._keep_skips(unit.name, output)
        return output

    def _keep_skips(self, name: str, output: Any) -> None:
        """Keep the results of a unit that later stages use."""
        call = self._call_counts[name]
        self._call_counts[name] += 1
        for place, leaf in enumerate(flatten_result(output)):
            if (name, call, place) in self._own_skips and isinstance(leaf, torch.Tensor):
                key = name, call, place
                # later stages repeat the change
                self._skips[key] = leaf.clone() if key in self._changed_skips else leaf
                self._versions[key] = self._skips[key]._version

    def run_graph(self, compute: Callable[[list[torch.Tensor]], list[Any]]) -> list[Any]:
        """
        Run this stage of a model that is one graph.

        Args:
            compute: takes the received tensors; returns tensors to send, or the results on the last
                stage.

        Raises:
            UsageError: the model was called before in this forward.
        """
        if self._is_graph:
            what = (
                f"the model is called twice for a micro-batch; stage {self.stage} of a graph runs"
                " once"
            )
            raise UsageError(what, where=API_NAME, hint="one call in forward=, on all of the rows")
        self._is_graph = self._is_inside = True
        self._on_enter()
        made = compute(self.tensors)
        if self.stage == self.stages.split.stage_count - 1:
            return made
        self._next_module, self._leaf_count = "the graph's next part", len(made)
        self._sent = [
            SentTensor(place, tuple(x.shape), x.dtype, x.requires_grad)
            for place, x in enumerate(made)
        ]
        self.outputs = made
        raise StageBoundary

    def _placeholder_for(self, unit: StageUnit) -> Any:
        """Return a placeholder of the form that the earlier stage's module returned."""
        key = (unit.name, self._placeholder_counts[unit.name])
        if self._is_inside or key not in self._forms:
            raise UsageError(
                f"{unit.name} is of stage {unit.stage} and is called "
                + ("after" if self._is_inside else "in")
                + f" stage {self.stage}'s part of this micro-batch, and not before",
                where=API_NAME,
                hint="stages={glob: stage} in the order in which forward calls them"
                + self._describe_calls(unit),
            )
        self._placeholder_counts[unit.name] += 1
        assert self.record is not None
        if self._skips and any(skip[:2] == key for skip in self._skips):
            return self._value_with_skips(key)
        value = self.record.placeholders.get(key)
        if value is None or any(map(_was_changed, pytree.tree_leaves(value))):
            value = self.record.placeholders[key] = build_value(
                self._forms[key], self.stages.make_placeholder
            )
        return value

    def _describe_calls(self, unit: StageUnit) -> str:
        """Return the order of the calls as text; empty if it is not known."""
        calls = self.stages.trace.calls
        if not calls:
            return ""
        if unit.name in calls and self._placeholder_counts[unit.name]:
            return f"; {unit.name} is called several times, which needs one stage for all between"
        return f": {', '.join(calls[:MAX_LISTED_CALLS])}" + ", ..." * (
            len(calls) > MAX_LISTED_CALLS
        )

    def _value_with_skips(self, key: tuple[str, int]) -> Any:
        """Return a placeholder in which received results are the real ones."""
        place = -1

        def make_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            real = self._skips.get((*key, place))
            if real is None:
                return self.stages.make_placeholder(shape, dtype)
            if (*key, place) in self._changed_skips:
                return real.clone()  # a later stage gets what this one got
            if real.requires_grad:
                return _WritableInput.apply(real)
            return real

        def count_leaf() -> None:
            nonlocal place
            place += 1

        return build_value(self._forms[key], make_tensor, count_leaf)

    def _enter_stage(
        self, unit: StageUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments with received tensors instead of placeholders."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        if not self._is_inside:
            self._is_inside = True
            self._on_enter()
            if self.record is not None:
                self._bind_received(unit, leaves)
        replaced = self._replace_placeholders(leaves, unit.name)
        return pytree.tree_unflatten(replaced, form)  # type: ignore[no-any-return]

    def _bind_received(self, unit: StageUnit, leaves: list[Any]) -> None:
        record = self.record
        assert record is not None
        if record.next_module != unit.name or record.leaf_count != len(leaves):
            raise UsageError(
                f"stage {self.stage} starts with {unit.name}, and stage {self.stage - 1} ended"
                f" before {record.next_module}",
                where=API_NAME,
                hint="make the order of module calls in forward depend on the batch only",
            )
        for sent, tensor in zip(record.sent, self.tensors, strict=True):
            if sent.index < 0:
                continue
            mine = leaves[sent.index]
            if isinstance(mine, FakeTensor):
                real = _WritableInput.apply(tensor) if tensor.requires_grad else tensor
                self._replacements[id(mine)] = (mine, mine._version, real)

    def _replace_placeholders(
        self, leaves: list[Any], name: str, is_strict: bool = True
    ) -> list[Any]:
        found = []
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                blank, version, real = self._replacements.get(id(leaf), (leaf, -1, leaf))
                if is_strict and (real is leaf or blank._version != version):
                    self._refuse_placeholder(
                        f"{name} of stage {self.stage} takes a value that an earlier stage computed"
                    )
                leaf = leaf if blank._version != version else real
            found.append(leaf)
        return found

    def _refuse_placeholder(self, what: str) -> NoReturn:
        if self.remote_reads:
            names = ", ".join(dict.fromkeys(self.remote_reads))
            shared = ", ".join(map(repr, dict.fromkeys(self.remote_reads)))
            raise UsageError(
                f"{what} with {names}, which this stage does not have",
                where=API_NAME,
                hint=f"shared=[{shared}] gives it to the last stage, too",
            )
        why = ""
        if self.stages.trace.error:
            why = f" (its forward could not be traced for that: {self.stages.trace.error[:200]})"
        raise UsageError(
            f"{what} and does not pass on{why}",
            where=API_NAME,
            hint="only the arguments of a stage's first module and results that the first forward"
            " showed are sent: have the module take and return the value, or split elsewhere with"
            " stages={glob: stage}",
        )

    def _leave_stage(
        self, unit: StageUnit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoReturn:
        """End the forward at the first module of a later stage."""
        leaves = pytree.tree_leaves((args, kwargs))
        self._next_module, self._leaf_count = unit.name, len(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._batch_ids:
                self._sent.append(
                    SentTensor(index, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
                )
                self.outputs.append(leaf)
        self._send_skips()
        raise StageBoundary

    def _send_skips(self) -> None:
        """Send the results that later stages use, each tensor once."""
        slots = {id(x): slot for slot, x in enumerate(self.outputs)}
        for skip in self.stages.trace.skips:
            if not skip.crosses(self.stage) or skip.key not in self._skips:
                continue
            tensor = self._skips[skip.key]
            if self._versions.get(skip.key, tensor._version) != tensor._version:
                raise UsageError(
                    f"the result of {skip.key[0]}, which stage {skip.last} uses, is changed in"
                    " place after it was returned",
                    where=API_NAME,
                    hint="compute a new tensor instead (x = x + y, not x += y)",
                )
            if id(tensor) not in slots:
                slots[id(tensor)] = len(self.outputs)
                # one that is passed on gets a node of its own in the graph of this stage
                passed = tensor.view_as(tensor) if skip.source < self.stage else tensor
                self.outputs.append(passed)
                self._sent.append(
                    SentTensor(-1, tuple(passed.shape), passed.dtype, passed.requires_grad)
                )
            self._sent_skips.append((skip.key, slots[id(tensor)]))

    def check_end(self) -> None:
        """Refuse a forward that has ended before the last stage, or without its modules."""
        last = self.stages.split.stage_count - 1
        if self.stage < last:
            raise UsageError(
                f"forward ended in stage {self.stage}, without a call of a module of a later one",
                where=API_NAME,
                hint="a micro-batch can skip modules, but not all of the following stages",
            )
        if not self._is_inside:
            raise UsageError(f"forward called no module of stage {self.stage}", where=API_NAME)

    def complete_output(self, output: Any, is_strict: bool, what: str = "the output") -> Any:
        """Return a result with received tensors instead of placeholders."""
        leaves, form = pytree.tree_flatten(output)
        found = self._replace_placeholders(leaves, what, is_strict)
        return pytree.tree_unflatten(found, form)


@contextlib.contextmanager
def _explain_reads(stage: int, where: str) -> Iterator[None]:
    """Say what it means that code reads the value of a placeholder."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"stage {stage} {where} reads a value that stage {stage - 1} or an earlier one"
            " computed",
            where=API_NAME,
            hint="make decisions of forward depend on the batch, or make them inside a module",
        ) from error


class _WritableInput(torch.autograd.Function):
    """
    A received tensor as the model gets it: it can be changed in place, like a module's result.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


def _was_changed(leaf: Any) -> bool:
    """Whether a placeholder has been written to, and must not be used again."""
    return isinstance(leaf, torch.Tensor) and (leaf._version > 0 or leaf.requires_grad)
