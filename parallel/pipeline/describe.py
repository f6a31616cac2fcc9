"""
The description of a pipeline: the modules of each stage, their share of the cost, and the bubble.
"""

from __future__ import annotations

from pdrun.parallel.pipeline.schedules.schedule import PipelineSchedule
from pdrun.parallel.pipeline.schedules.timeline import ActionCosts, bubble_share, draw_schedule
from pdrun.parallel.pipeline.schedules.validate import validate_schedule
from pdrun.parallel.pipeline.split import StageSplit

MAX_LINE_CHARS = 140
"""Length of a line of the drawing."""


def describe_pipeline(schedule: PipelineSchedule, cut: StageSplit) -> str:
    """
    Return lines about stages and schedule.

    The bubble is simulated twice: for stages of equal size, as the schedule alone has it, and with
    the stages' shares of the cost (by default, of the number of weights).
    """
    sized = ActionCosts(shares=cut.cost_shares)
    lines = [
        f"pipeline: {schedule.stage_count} stages on {schedule.rank_count} ranks,"
        f" schedule {schedule.name}, {schedule.microbatch_count} micro-batches",
        f"  bubble {bubble_share(schedule):.1%} of the ranks' time for stages of equal size,"
        f" {bubble_share(schedule, sized):.1%} with these shares",
        f"  at most {max(validate_schedule(schedule).live)} activations of a stage live on a rank",
    ]
    for stage, place in enumerate(schedule.stage_ranks):
        names = shorten_names(cut.modules_of(stage))
        lines.append(f"  stage {stage} on rank {place}, {cut.cost_shares[stage]:6.1%}: {names}")
    for name, stages in cut.loose_weights.items():
        word = "stage" if len(stages) == 1 else "stages"
        lines.append(f"  {name} is on {word} {', '.join(map(str, stages))}")
    drawn = draw_schedule(schedule).splitlines()
    lines += [
        f"  {line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 4] + ' ...'}"
        for line in drawn
    ]
    return "\n".join(lines)


def shorten_names(names: list[str]) -> str:
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
