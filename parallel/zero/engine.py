"""
What happens to weights, gradients and optimizer around the forward and backward passes of one step.

    begin_step                                                                               once
    with forward(chunk, micro):                       the weights are there                  each micro-batch
        ...
    with backward(chunk, micro, last):                they are there again                   each micro-batch
        begin(first, last) -> ... -> backward_done    gradients are collected and summed     each micro-batch
    finish(sums) -> optimizer.step -> step_done                                              once

Below level 3 the weights are always there, and `forward` and `backward` do nothing.

Below level 1 a weight is trained where it is. Under levels 1 to 3 each rank trains its segments of
the weights that it shares with its group (`cuts`); at level 3 `gatherer` also keeps the weights in
memory only where they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.rank_groups import RankGroups
from pdrun.parallel.comm.sharded import PendingResult, ShardedGroup
from pdrun.parallel.model.shard_map import WeightCatalogue, ShardMap
from pdrun.parallel.model.weights import Weight, assign_units, make_buckets
from pdrun.parallel.zero.bucket_order import BucketOrder
from pdrun.parallel.zero.gatherer import Gatherer
from pdrun.parallel.zero.grad_norm import clip_factor, global_norm
from pdrun.parallel.zero.gradients import GradBundle, Policy, Pool
from pdrun.parallel.zero.optimizer import TrainedPart
from pdrun.parallel.zero.settings import Settings
from pdrun.parallel.zero.shards import Cut


class Engine:
    """
    The weights of a model on the data axes, and the sums that go beyond these.

    Args:
        model: what this rank runs.
        weights: its weights, with their tiles.
        place: this rank on the mesh.
        holders: who holds what along the model axes.
        catalogue: the weights of the whole model.
        units: names of the modules whose weights are gathered together (level 3).
        fill: gives weights that have no memory yet their first values.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: list[Weight],
        place: RankGroups,
        holders: ShardMap,
        catalogue: WeightCatalogue,
        settings: Settings,
        units: Sequence[str] = (),
        fill: Callable[[Sequence[Weight]], None] = lambda weights: None,
    ) -> None:
        self._fill = fill
        self.weights = weights
        self.place = place
        self.holders = holders
        self.catalogue = catalogue
        self.settings = settings
        self.whole = place.data
        self.cut = place.sharded_data
        self.gathers = place.weight_gathers
        self._policy = Policy(
            settings.level,
            settings.exact,
            settings.accumulate,
            settings.wire_dtype,
            settings.keep_for_step,
        )
        self.pool = Pool()
        self.bundles: list[GradBundle] = []
        self.cuts: list[Cut] = []
        self.cut_of: dict[int, Cut] = {}
        """By index of a gradient bundle."""
        self.masters: dict[int, nn.Parameter] = {}
        """Wider copies of weights that aren't cut, by index of the weight."""
        self.gatherer: Gatherer | None = None
        self._units = list(units)
        self._build(model)
        self.alone = [weight for weight in weights if weight.unsynced and weight.is_trained]
        for index, part in enumerate(self.bundles):
            for weight in part.weights:
                weight.param.register_post_accumulate_grad_hook(self._hook(index))
        self._targets = [self._trained(index) for index in range(len(self.bundles))]
        self._paused = False
        # where gathers run beside sums, a process that waits for a sum might keep others from the
        # gather that they need
        may_wait = (
            self.gatherer is None or settings.keep_for_step or self.whole.device.type != "cpu"
        )
        self._order = BucketOrder(self.bundles, self._unit_indices(), self.gatherer, may_wait)
        only = len(place.loss_ranks) < place.job.world
        self._tellers = torch.tensor(place.loss_ranks, device=self.whole.device) if only else None
        self.used = [False] * len(catalogue.weights)
        """Which weights of the whole model had a gradient in the last step, on any rank."""

    # ---- building -----------------------------------------------------------

    def _build(self, model: nn.Module) -> None:
        settings = self.settings
        shared = [weight for weight in self.weights if not weight.unsynced]
        cut = [
            weight for weight in shared if settings.level and weight.nbytes >= settings.threshold
        ]
        if settings.level < 3:
            cut = [weight for weight in cut if weight.is_trained]
        else:
            assign_units(model, self.weights, self._units)
        kept = [weight for weight in shared if weight not in set(cut)]
        by_unit: dict[str, list[Cut]] = {name: [] for name in ["", *self._units]}
        for name in reversed(["", *self._units]):  # in the order of their gradients
            mine = [weight for weight in cut if weight.unit == name]
            for group in make_buckets([w for w in mine if w.is_trained], settings.fusion):
                by_unit[name].append(self._add_cut(group, name, trained=True))
            for group in make_buckets([w for w in mine if not w.is_trained], settings.fusion):
                by_unit[name].append(self._add_cut(group, name, trained=False))
        for group in make_buckets([w for w in kept if w.is_trained], settings.fusion):
            self._add_bundle(group, self.whole)
        for weight in self.weights:
            if weight not in set(cut):
                self._narrow(weight)
        if settings.level == 3:
            self._units = [name for name in self._units if by_unit[name]]
            self.gatherer = Gatherer(
                model, by_unit, self._units, self.gathers, settings.keep_for_step, self._skip_unit
            )

    def _add_bundle(self, group: Sequence[Weight], comm: ShardedGroup) -> None:
        label = (
            f"the sum of gradients {len(self.bundles)} ({group[0].name} and {len(group) - 1} more)"
        )
        dtype = self.settings.precision.sum_dtype(group[0].dtype)
        across = self.place.sum_groups(group[0].sum_axes, group[0].stages)
        self.bundles.append(GradBundle(group, comm, self._policy, self.pool, dtype, label, across))

    def _add_cut(self, group: Sequence[Weight], unit: str, *, trained: bool) -> Cut:
        own = group[0].dtype
        compute = self.settings.precision.weight_dtype(own, group[0].keep_dtype)
        self._fill(group)
        made = Cut(
            group,
            self.gathers,
            compute=compute,
            train=own,
            released=self.settings.level == 3,
            home=self.settings.master_device or self.whole.device,
            label=f"the weights of {unit or group[0].name}",
        )
        self.cuts.append(made)
        if trained:
            self.cut_of[len(self.bundles)] = made
            self._add_bundle(group, self.cut)
        return made

    def _narrow(self, weight: Weight) -> None:
        """
        Have the model compute with a copy of a weight that isn't cut, in the type of the policy.
        """
        self._fill([weight])
        compute = self.settings.precision.weight_dtype(weight.dtype, weight.keep_dtype)
        if compute != weight.dtype or (
            weight.is_trained and self.settings.master_device not in (None, self.whole.device)
        ):
            wide = weight.param.detach()
            if weight.is_trained:
                home = self.settings.master_device or self.whole.device
                self.masters[weight.index] = nn.Parameter(wide.to(home, copy=True))
            weight.param.data = wide.to(compute, copy=True)

    def _trained(self, index: int) -> list[nn.Parameter]:
        """Return what the optimizer trains of a bundle, in the order of its segments."""
        if index in self.cut_of:
            return self.cut_of[index].parts
        part = self.bundles[index]
        mine = [part.weights[segment.slot] for segment in part.segments]
        return [self.masters.get(weight.index, weight.param) for weight in mine]

    def _unit_indices(self) -> list[int]:
        """Return the index of the unit of each gradient bundle; -1 for none."""
        places = {name: place for place, name in enumerate(self._units)}
        found = []
        for index, part in enumerate(self.bundles):
            found.append(places.get(part.weights[0].unit, -1) if index in self.cut_of else -1)
        return found

    def _skip_unit(self, unit: int) -> None:
        """Count a unit that took no part in this rank's forward pass as zero."""
        self._order.complete_unit(unit)

    def parts_of(self, param: nn.Parameter) -> list[TrainedPart]:
        """Return what this rank trains of a parameter of the model."""
        for cut in self.cuts:
            for slot, weight in enumerate(cut.weights):
                if weight.param is param:
                    found = zip(cut.segments, cut.parts, strict=True)
                    return [(part, segment) for segment, part in found if segment.slot == slot]
        weight = next(weight for weight in self.weights if weight.param is param)
        return [(self.masters.get(weight.index, param), None)]

    # ---- a micro-batch ------------------------------------------------------

    def clear(self) -> None:
        """Release weights that a pass which did not end has left there."""
        if self.gatherer is not None:
            self.gatherer.end()

    def begin_step(self) -> None:
        """
        Begin a step: forget what one that did not end has left, whose error the user has caught.
        """
        self.clear()
        for part in self.bundles:
            part.forget()
        for weight in self.weights:
            weight.param.grad = None
            if weight.param.requires_grad and not weight.is_trained:
                what = f"{weight.name} requires a gradient now, and did not when the run was made: it is not trained"
                hint = "let it require one before pdrun.parallelize; requires_grad_(False) may freeze it afterwards"
                raise UsageError(what, where="pdrun.Run.step", hint=hint)

    @contextmanager
    def forward(self, chunk: int = 0, micro: int = 0) -> Iterator[None]:
        """
        While this lasts, weights are there for a forward pass.

        Args:
            chunk: the part of the model that computes.
            micro: the place of its micro-batch, of several that compute side by side the first
                one's.
        """
        if self.gatherer is not None:
            self.gatherer.begin_forward(chunk, micro)
        yield
        if self.gatherer is not None:
            self.gatherer.end_forward()

    @contextmanager
    def backward(
        self, chunk: int = 0, micro: int = 0, last: bool = True, for_input: bool = False
    ) -> Iterator[None]:
        """
        While this lasts, weights are there for the backward pass that belongs to a forward one.

        Args:
            chunk, micro: of the forward pass.
            last: whether it is the step's last one of the chunk, after which its weights need no
                longer be there.
            for_input: whether the gradients of weights come later.
        """
        if self.gatherer is not None:
            self.gatherer.begin_backward(chunk, micro, last, for_input)
        yield
        if self.gatherer is not None:
            self.gatherer.end_backward()

    def evaluated(self, chunk: int = 0) -> None:
        """Release the weights of a chunk that has gone forward only."""
        if self.gatherer is not None:
            self.gatherer.end(chunk)

    def begin(self, first: bool, last: bool, chunk: int | None = None, times: int = 1) -> None:
        """
        Prepare for the gradients of a micro-batch, when its forward pass has been made.

        Args:
            first, last: whether it is the step's first or last one.
            chunk: the part of the model whose backward comes; None: all of it.
            times: how many gradients each weight gets, of copies that compute side by side; their
                sum is taken.
        """
        self._order.begin(first, last, chunk, times)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # torch holds a tensor's hooks where no garbage collector looks: one that held the engine
        # would keep a run, and all that it trains, for as long as the process lives
        me = weakref.ref(self)

        def arrived(param: torch.Tensor) -> None:
            engine = me()
            if engine is not None and not engine._paused:
                engine._order.count_gradient(index)

        return arrived

    def backward_done(self) -> None:
        """
        End a micro-batch: weights that took no part count as zero.

        Raises:
            UsageError: a weight got a second gradient after its first had been sent.
        """
        if self.gatherer is not None:
            self.gatherer.rest()
        self._order.complete_all()

    # ---- the step -----------------------------------------------------------

    def finish(self, sums: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        End all sums over the ranks, divide and clip; return the global (sum, count) and the norm
        where one is wanted.

        Args:
            sums: ``[accumulate, 2]``: sum and count of the loss of each of this rank's
                micro-batches.
            scale: what the losses were multiplied with besides.

        Raises:
            UsageError: the counts add up to nothing.
        """
        told = self._tell(sums)
        for part in self.bundles:
            part.join()
        by_rank, self.used = told.wait()
        by_slice = by_rank if self._tellers is None else by_rank.index_select(0, self._tellers)
        numbers = by_slice.transpose(0, 1).reshape(-1, 2).sum(0)
        count = numbers[1]
        if count.device.type == "cpu" and not float(count) > 0:
            raise UsageError(
                f"the loss's counts add up to {float(count):g}", where="pdrun.Run.step"
            )
        by = count * scale if self.settings.mean else torch.full_like(count, scale)
        totals = self._totals()
        loose = [grad for weight in self.alone if (grad := weight.param.grad) is not None]
        for tensor in [*totals, *loose]:
            tensor.div_(by)
        norm = None
        if self.settings.clip or self.settings.norm:
            pairs = list(zip(self.bundles, totals, strict=True))
            norm = global_norm(pairs, self.alone, self.place, self.settings.exact)
        if self.settings.clip and norm is not None:
            factor = clip_factor(norm, self.settings.clip)
            if factor.device.type != "cpu" or not bool(factor == 1):
                for tensor in [*totals, *loose]:
                    tensor.mul_(factor.to(tensor.dtype))
                if factor.device.type != "cpu" or not bool(torch.isfinite(factor)):
                    for (
                        part
                    ) in self.bundles:  # 0 times nan would stay, and make every later norm nan
                        part.clear_padding()
        self._hand_over()
        return numbers, norm

    def _tell(self, sums: torch.Tensor) -> PendingResult:
        """Start exchanging every slice's loss, and which weights had a gradient on any rank."""
        flags = [False] * len(self.used)
        for part in self.bundles:
            for weight, used in zip(part.weights, part.used, strict=True):
                flags[weight.index] = used
        return self.place.job.exchange_numbers(sums, flags, "the losses")

    def _totals(self) -> list[torch.Tensor]:
        """
        Return each bundle's total over the data axes and over what its weights ask for besides.
        """
        for place in range(max((len(part.across) for part in self.bundles), default=0)):
            for part in self.bundles:
                if place < len(part.across):
                    part.spread(place)
        return [part.finish() for part in self.bundles]

    def _hand_over(self) -> None:
        """Give the optimizer's tensors their gradients; those that nobody used get none."""
        for index, part in enumerate(self.bundles):
            part.used = [self.used[weight.index] for weight in part.weights]
            all_used = all(part.used)
            for target, segment, piece in zip(
                self._targets[index], part.segments, part.pieces(), strict=True
            ):
                if all_used or part.used[segment.slot]:
                    target.grad = (
                        piece
                        if self.settings.master_device is None and piece.dtype == target.dtype
                        else _like(piece, target)
                    )
                else:
                    target.grad = None
        for weight in self.alone:
            master = self.masters.get(weight.index)
            if master is not None and weight.param.grad is not None:
                master.grad = _like(weight.param.grad, master)
                weight.param.grad = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """
        While this lasts, a copy of the model may be called and go backward: nothing is gathered or
        summed for it.

        Raises:
            UsageError: the model's own weights have got gradients.
        """
        self._paused = True
        if self.gatherer is not None:
            self.gatherer.paused = True
        try:
            yield
        finally:
            self._paused = False
            if self.gatherer is not None:
                self.gatherer.paused = False
        found = [weight for weight in self.weights if weight.param.grad is not None]
        for weight in found:
            weight.param.grad = None
        if found:
            what = f"loss= or forward= computes with {found[0].name} of the run's model, and not of the one it is given"
            hint = "forward=lambda model, batch: ... is given the model; what it returns is loss's first argument"
            raise UsageError(what, where="pdrun.Run.verify", hint=hint)

    def settle(self) -> None:
        """Have nothing on its way, before weights are changed from outside."""
        self.clear()
        for cut in self.cuts:
            if cut.released:
                cut.close()
            else:
                cut.ready()

    def publish(self) -> None:
        """Give the model the weights that the parts hold, after these were changed from outside."""
        for cut in self.cuts:
            cut.publish()
        self.renew()

    def step_done(self) -> None:
        """After the optimizer's step: forget the gradients, and give the model its new weights."""
        for index, part in enumerate(self.bundles):
            part.drop()
            for target in self._targets[index]:
                target.grad = None
            if index in self.cut_of:
                self.cut_of[index].publish()
        for weight in self.alone:
            self.masters.get(weight.index, weight.param).grad = weight.param.grad = None
        self.renew()

    @cached_property
    def copied(self) -> list[Weight]:
        """
        Weights that are there between steps as copies of what the optimizer trains, in another type
        or place.
        """
        cut = {
            weight.index
            for part in self.cuts
            if not part.released and not part.shared
            for weight in part.weights
            if weight.is_trained
        }
        return [
            weight for weight in self.weights if weight.index in self.masters or weight.index in cut
        ]

    @property
    def turned(self) -> bool:
        """Whether the optimizer trains other tensors than the model's parameters."""
        return bool(self.cut_of or self.masters)

    def renew(self) -> None:
        """
        Bring the model's parameters up to date with the masters that aren't cut, and end gathers
        that publish.
        """
        if self.masters:
            pairs = [
                (weight.param.data, self.masters[weight.index].detach())
                for weight in self.weights
                if weight.index in self.masters
            ]
            with torch.no_grad():
                torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        for cut in self.cuts:
            if not cut.released:
                cut.ready()


def _like(grad: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the type and place of what it trains."""
    return grad.to(device=target.device, dtype=target.dtype)
