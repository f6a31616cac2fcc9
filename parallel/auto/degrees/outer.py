"""
The outer search: degrees of all axes but cp, optimizer level, recomputation, micro-batches,
schedule.

For each tensor degree and number of rows the operators are searched once, on a graph with three
layers. Every candidate is then arithmetic. A candidate that is not chosen has a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pdrun.errors import UsageError
from pdrun.parallel.auto.choose import RECURSIVE, SIGNIFICANT_SAVING, choose_plan
from pdrun.parallel.auto.degrees.choices import StepChoice
from pdrun.parallel.auto.degrees.condense import ROWS_OF_EXPORTS, RowScaler
from pdrun.parallel.auto.degrees.expert_layers import cut_expert_weights, refuse_degree
from pdrun.parallel.auto.degrees.factors import factors_by_nodes, ideal_cost, list_factors
from pdrun.parallel.auto.degrees.pass_costs import PassCost, count_model_flops, price_parts
from pdrun.parallel.auto.degrees.result import PLAN_API, OuterResult, PlanRequest, PricedChoice
from pdrun.parallel.auto.degrees.step_costs import (
    CHUNKS,
    balance_stages,
    cost_step,
)
from pdrun.parallel.auto.prices import PriceList
from pdrun.parallel.auto.search.missing_rules import (
    MissingRule,
    check_missing_rules,
    find_missing_rules,
)
from pdrun.parallel.auto.search.problem import SearchProblem
from pdrun.parallel.layouts.grid import Grid

MAX_ROWS_OF_MANY = 8
"""Rows of one of several passes, up to which a candidate is considered."""
MAX_PROMISING = 10
"""Candidates whose tensor degree is tried as two axes."""
MAX_FACTORED = 3
"""Searches of operators on two axes by the recursive search."""
LEVELS: tuple[tuple[int, str | None], ...] = (
    (0, None),
    (1, None),
    (2, None),
    (3, "pass"),
    (3, "step"),
)
DEGREE_NAMES = ("pp", "dp", "ep", "tp")


def search_degrees(scaler: RowScaler, request: PlanRequest) -> OuterResult:
    """Return all candidates of a request."""
    _check_fixed(request)
    return _OuterSearch(scaler, request).run()


def _check_fixed(request: PlanRequest) -> None:
    known = (*DEGREE_NAMES, "level", "microbatches")
    for name, value in request.fixed.items():
        if name not in known:
            hint = f"fixed can have {', '.join(known)}"
            raise UsageError(f"{name} cannot be fixed", where=PLAN_API, hint=hint)
        if isinstance(value, bool) or not isinstance(value, int) or value < (name != "level"):
            raise UsageError(f"{name} must be a count, got {value!r}", where=PLAN_API)
        if name in DEGREE_NAMES and request.devices % value:
            what = f"{name}={value} does not divide the {request.devices} devices"
            raise UsageError(what, where=PLAN_API)


class _OuterSearch:
    """Collects the candidates of one request."""

    def __init__(self, scaler: RowScaler, request: PlanRequest) -> None:
        self.scaler = scaler
        self.request = request
        self.result = OuterResult(request)
        self._passes: dict[tuple[tuple[int, ...], int, int, str], PassCost] = {}
        self._missing: dict[int, list[MissingRule]] = {}
        self._balanced: dict[tuple[object, ...], tuple[int, ...]] = {}

    def run(self) -> OuterResult:
        """Price all candidates."""
        for choice in self._balance_choices(self._list_choices()):
            self._take(self._price(choice))
        self._sort()
        self._try_factors()
        self._sort()
        self._note_missing_rules()
        return self.result

    def _price(self, choice: StepChoice, search: str = "") -> PricedChoice:
        return self._price_with(choice, self._pass_cost(choice, search))

    def _price_with(self, choice: StepChoice, cost: PassCost) -> PricedChoice:
        request = self.request
        step = cost_step(choice, cost, request.kinds, request.topology, request.itemsize)
        return PricedChoice(choice, step)

    def _take(self, priced: PricedChoice) -> None:
        fits = priced.cost.peak <= self.request.memory
        (self.result.fitting if fits else self.result.too_large).append(priced)

    def _sort(self) -> None:
        self.result.fitting.sort(key=lambda one: (one.cost.total, one.cost.peak))
        self.result.too_large.sort(key=lambda one: (one.cost.peak, one.cost.total))

    def _try_factors(self) -> None:
        """
        Add candidates whose tensor degree is two axes, where those could be faster than the best.

        The recursive search prices them, because it takes a fifth of the time. The fastest is
        searched as the request says if it is the best even so.
        """
        fitting = self.result.fitting
        if not fitting:
            return
        tried: set[tuple[tuple[int, ...], int]] = set()
        found: list[PricedChoice] = []
        for choice in self._list_promising():
            for factors in list_factors(choice.tp):
                if len(tried) >= MAX_FACTORED and (factors, choice.rows) not in tried:
                    continue
                tried.add((factors, choice.rows))
                found.append(self._price(replace(choice, factors=factors), RECURSIVE))
        found.sort(key=lambda one: (one.cost.total, one.cost.peak))
        best = next((one for one in found if one.cost.peak <= self.request.memory), None)
        if best is not None and best.cost.total < fitting[0].cost.total * (1 - SIGNIFICANT_SAVING):
            self._take(self._price(best.choice))

    def _list_promising(self) -> list[StepChoice]:
        """
        Return the candidates with one tensor axis that would be the best with an ideal split, the
        most promising first.
        """
        limit = self.result.fitting[0].cost.total
        found = []
        for one in self.result.fitting:
            choice = one.choice
            if choice.factors or choice.stage_layers or not list_factors(choice.tp):
                continue
            full = self._pass_cost(replace(choice, tp=1))
            ideal = self._price_with(choice, ideal_cost(self._pass_cost(choice), full, choice.tp))
            if ideal.cost.total < limit * (1 - SIGNIFICANT_SAVING):
                found.append((ideal.cost.total, one.cost.total, choice))
        found.sort(key=lambda entry: entry[:2])
        return [choice for *_, choice in found[:MAX_PROMISING]]

    def _balance_choices(self, choices: Iterable[StepChoice]) -> Iterator[StepChoice]:
        """Yield choices that can be, and those whose stages have other numbers of layers."""
        for choice in choices:
            if not self._can_split(choice):
                continue
            if not self._divides(choice.pp):
                yield replace(choice, stage_layers=self._balance(choice))
                continue
            yield choice
            if choice.pp > 1 and self._has_names() and choice.schedule != "interleaved":
                balanced = self._balance(choice)
                if len(set(balanced)) > 1:
                    yield replace(choice, stage_layers=balanced)

    def _balance(self, choice: StepChoice) -> tuple[int, ...]:
        key = choice.pp, choice.tp, choice.ep, choice.factors, choice.rows, choice.recompute
        if key not in self._balanced:
            cost = self._pass_cost(choice)
            self._balanced[key] = balance_stages(choice, cost, self.request.topology)
        return self._balanced[key]

    def _divides(self, pp: int) -> bool:
        return pp == 1 or self.scaler.layers % pp == 0

    def _has_names(self) -> bool:
        return len(self.request.layer_names) == self.scaler.layers > 0

    def _check_stages(self, pp: int) -> str:
        """Return why a model cannot have a number of stages; empty if it can."""
        layers = self.scaler.layers
        if pp == 1:
            return ""
        if not layers:
            return "the model has no equal layers"
        if pp > layers:
            return f"the model has {layers} equal layers"
        if layers % pp and not self._has_names():
            return f"{layers} equal layers do not divide into {pp} stages"
        return ""

    def _refuse(self, name: str, why: str) -> None:
        self.result.refused.setdefault(name, why)

    def _list_choices(self) -> Iterator[StepChoice]:
        """Yield what is possible; note a reason for what is not."""
        request = self.request
        for pp in self._degrees("pp", request.devices):
            if why := self._check_stages(pp):
                self._refuse(f"pp={pp}", why)
                continue
            for tp in self._degrees("tp", request.devices // pp):
                inner = request.topology.levels[0].devices
                factors: tuple[int, ...] | None = ()
                if inner is not None and tp > inner and "tp" not in request.fixed:
                    factors = None if self._can_fill(pp, inner) else factors_by_nodes(tp, inner)
                if factors is None:
                    self._refuse(f"tp={tp}", f"it spans nodes of {inner} devices")
                    continue
                for dp, ep in self._list_row_parts(request.devices // pp // tp, tp):
                    for choice in self._list_savers(pp, dp, ep, tp):
                        yield replace(choice, factors=factors)

    def _list_row_parts(self, count: int, tp: int) -> Iterator[tuple[int, int]]:
        """Yield the degrees of dp and ep that cut the rows into a number of parts."""
        request = self.request
        for ep in self._degrees("ep", count) if self._may_cut_experts() else (1,):
            dp = count // ep
            if request.fixed.get("dp", dp) != dp:
                continue
            if request.rows % count:
                name = f"dp={dp}" if ep == 1 else f"dp={dp}, ep={ep}"
                self._refuse(name, f"{request.rows} rows do not divide by {count}")
            elif why := self._check_experts(ep):
                self._refuse(f"ep={ep}", why)
            elif ep > 1 and tp > 1:
                self._refuse("ep and tp together", "a plan splits operators or experts")
            else:
                yield dp, ep

    def _may_cut_experts(self) -> bool:
        return bool(self.request.expert_layers) or "ep" in self.request.fixed

    def _check_experts(self, ep: int) -> str:
        """Return why experts cannot be cut into parts; empty if they can."""
        graph = self.scaler.graph_of(ROWS_OF_EXPORTS[0])
        return refuse_degree(self.request.expert_layers, ep, graph)

    def _can_fill(self, pp: int, node: int) -> bool:
        """Return whether there are enough rows that no tensor axis has to span nodes."""
        request = self.request
        count = request.devices // pp
        return any(
            count % tp == 0 and request.rows % (count // tp) == 0
            for tp in self._degrees("tp", count)
            if tp <= node
        )

    def _can_split(self, choice: StepChoice) -> bool:
        """Return whether the operators without a rule leave enough for tensor axes to split."""
        if choice.tp == 1 or [] in self._missing.values():  # the same operators for all rows
            return True
        if choice.rows not in self._missing:
            grid = Grid(("tp",), (choice.tp,))
            graph = self.scaler.graph_of(choice.rows)
            problem = SearchProblem(graph, grid, PriceList(graph, grid, self.request.topology))
            self._missing[choice.rows] = find_missing_rules(problem, self.scaler.times)
        for one in self._missing[choice.rows]:
            if one.is_refused:
                self._refuse("tp", f"with {choice.rows} rows per pass {one.describe_fault()}")
                return False
        return True

    def _note_missing_rules(self) -> None:
        """
        Note the operators without a rule for the best candidate with a tensor axis.

        Raises:
            UsageError: tensor parallel is asked for, and no candidate can have it.
        """
        priced = (*self.result.fitting, *self.result.too_large)
        best = next((one for one in priced if one.choice.tp > 1), None)
        if best is not None:
            self.result.missing = self._missing.get(best.choice.rows, [])
        elif not priced:
            for missing in self._missing.values():
                check_missing_rules(missing, PLAN_API)

    def _degrees(self, name: str, count: int) -> list[int]:
        """Return the degrees of an axis that divide a number of devices."""
        given = self.request.fixed.get(name)
        return [
            degree
            for degree in range(1, count + 1)
            if count % degree == 0 and given in (None, degree)
        ]

    def _list_savers(self, pp: int, dp: int, ep: int, tp: int) -> Iterator[StepChoice]:
        """Yield the candidates of some degrees."""
        request = self.request
        per_rank = request.rows // (dp * ep)
        for count in (d for d in range(1, per_rank + 1) if per_rank % d == 0):
            rows = per_rank // count
            if request.fixed.get("microbatches", count) != count:
                continue
            if rows > MAX_ROWS_OF_MANY and count > 1:
                continue  # fewer passes of more rows: the candidate with one pass has most rows
            if pp > 1 and count < pp:
                self._refuse(f"pp={pp}, microbatches={count}", "a stage would have no work")
                continue
            for schedule in self._list_schedules(pp, count):
                for recompute in (None, "full")[: 1 + request.recompute]:
                    if recompute and (schedule == "zero-bubble" or not self.scaler.layers):
                        continue
                    for level, gather in LEVELS:
                        if request.fixed.get("level", level) != level:
                            continue
                        if level and dp * ep == 1:
                            continue
                        if level == 3 and pp > 1 and gather == "pass":
                            continue
                        yield StepChoice(
                            pp, dp, tp, level, gather, recompute, count, rows, schedule, ep=ep
                        )

    def _list_schedules(self, pp: int, count: int) -> list[str | None]:
        if pp == 1:
            return [None]
        found: list[str | None] = ["1f1b", "zero-bubble"]
        if self.scaler.layers % (pp * CHUNKS["interleaved"]) == 0 and count % pp == 0:
            found.append("interleaved")
        return found

    def _pass_cost(self, choice: StepChoice, search: str = "") -> PassCost:
        """
        Return the cost of a pass; the operators are searched once per tensor axes and rows.

        Args:
            search: default: that of the request.
        """
        rows, axes = choice.rows, choice.tensor_axes
        search = search or self.request.search
        key = (tuple(axes.values()), rows, choice.ep, search)
        if key not in self._passes:
            graph = self.scaler.graph_of(rows)
            traffic = None
            if choice.ep > 1:
                layers = self.request.expert_layers
                graph, traffic = cut_expert_weights(graph, layers, choice.ep)
            grid = Grid(tuple(axes), tuple(axes.values()))
            prices = PriceList(graph, grid, self.request.topology, compiled=self.request.compiled)
            problem = SearchProblem(graph, grid, prices, gather=self.request.gather)
            plan = choose_plan(problem, search, times=self.scaler.times).plan
            self.result.solves += choice.tp > 1
            if not self.result.flops:
                total = count_model_flops(plan, self.scaler.parts, self.scaler.layers)
                self.result.flops = total / rows
            saved = self.scaler.saved_of(rows)
            self._passes[key] = price_parts(
                prices, plan, self.scaler.parts, self.scaler.layers, saved, traffic
            )
        return self._passes[key]
