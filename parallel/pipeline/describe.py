"""
A pipeline in words: what lies on which stage, what share of the work that is, and what of the time
is bubble.
"""

from __future__ import annotations

from pdrun.parallel.pipeline.schedules.schedule import Schedule
from pdrun.parallel.pipeline.schedules.timeline import Costs, bubble, picture
from pdrun.parallel.pipeline.schedules.validate import validate
from pdrun.parallel.pipeline.split import Split

WIDTH = 140
"""Characters of a line of the picture."""


def describe(schedule: Schedule, cut: Split) -> str:
    """
    Return lines about stages and schedule.

    The bubble is simulated twice: for stages of equal size, where the schedule alone makes it, and
    with the stages' shares of the cost (of the number of weights, where no cost was given).
    """
    sized = Costs(shares=cut.shares)
    lines = [
        f"pipeline: {schedule.stages} stages on {schedule.ranks} ranks, schedule {schedule.name},"
        f" {schedule.microbatches} micro-batches",
        f"  bubble {bubble(schedule):.1%} of the ranks' time for stages of equal size, {bubble(schedule, sized):.1%}"
        " with these shares",
        f"  at most {max(validate(schedule).live)} activations of a stage live on a rank",
    ]
    for stage, place in enumerate(schedule.places):
        lines.append(
            f"  stage {stage} on rank {place}, {cut.shares[stage]:6.1%}: {_ranges(cut.modules(stage))}"
        )
    for name, stages in cut.loose.items():
        lines.append(
            f"  {name} is held by {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        )
    drawn = picture(schedule).splitlines()
    lines += [f"  {line if len(line) <= WIDTH else line[: WIDTH - 4] + ' ...'}" for line in drawn]
    return "\n".join(lines)


def _ranges(names: list[str]) -> str:
    """Return names with runs of numbered ones written as ``blocks.0 to blocks.3``."""
    found: list[list[str]] = []
    for name in names:
        before = found[-1][-1] if found else ""
        (holder, _, number), (other, _, last) = name.rpartition("."), before.rpartition(".")
        if (
            found
            and holder == other
            and number.isdigit()
            and last.isdigit()
            and int(number) == int(last) + 1
        ):
            found[-1].append(name)
        else:
            found.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)
