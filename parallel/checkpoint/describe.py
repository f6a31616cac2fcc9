"""The texts of ``pdrun checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdrun.parallel.checkpoint.index import check_run
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.transform import (
    find_checkpoint,
    needed_ranks,
    placement_for,
    rank_of_piece,
    read_placement,
    transform_checkpoint,
)
from pdrun.parallel.layouts.mindspore import to_mindspore
from pdrun.text import escape_text


def describe_checkpoint(reader: CheckpointReader) -> dict[str, Any]:
    """Return the contents of a checkpoint as plain data."""
    tensors = {}
    for name in reader.tensor_names():
        pieces = reader.pieces_of(name)
        tensors[name] = {
            "shape": list(reader.shape_of(name)),
            "type": pieces[0].dtype,
            "parts": len({piece.region for piece in pieces}),
            "ranks": sorted({rank_of_piece(piece) for piece in pieces}),
        }
    run = reader.run_json
    check_run(run, reader.folder)
    return {
        "folder": str(reader.folder),
        "format": run["format"],
        "steps": run["steps"],
        "ranks": len(run["indices"]),
        "epoch": run["position"][0],
        "batch": run["position"][1],
        "seed": run["seed"],
        "tensors": tensors,
    }


def format_table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def show_checkpoint(source: str, mesh: str = "", strategy: str = "", as_json: bool = False) -> str:
    """
    Return the contents of a checkpoint as text or JSON.

    Args:
        mesh, strategy: if one is given, also list the ranks whose files each rank of that mesh
            needs.
    """
    reader = CheckpointReader(find_checkpoint(Path(source)))
    summary = describe_checkpoint(reader)
    lists = None
    if mesh or strategy:
        lists = needed_ranks(reader, placement_for(mesh, strategy))
    if as_json:
        if lists is not None:
            summary["needs"] = lists
        return json.dumps(summary)
    progress = f"step {summary['steps']}, epoch {summary['epoch']}"
    head = f"{summary['folder']}: {progress}, saved by {summary['ranks']} ranks"
    rows = [("tensor", "type", "shape", "parts", "in the files of ranks")]
    for name, one in summary["tensors"].items():
        shape = " x ".join(map(str, one["shape"])) or "-"
        rows.append(
            (escape_text(name), one["type"], shape, str(one["parts"]), format_ranks(one["ranks"]))
        )
    parts = [head, format_table(rows)]
    if lists is not None:
        parts.append(format_needed_ranks(lists))
    return "\n".join(parts)


def format_needed_ranks(lists: Mapping[int, list[int]]) -> str:
    """Return a table of the ranks whose files each rank needs."""
    return format_table(
        [
            ("rank", "needs the files of ranks"),
            *((str(rank), format_ranks(found)) for rank, found in lists.items()),
        ]
    )


def format_ranks(numbers: list[int]) -> str:
    """Return ascending ranks as short text: 0-3, 6."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return (
        ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
        or "none"
    )


def transform_and_report(
    source: str,
    target: str,
    mesh: str,
    strategy: str,
    add_files: Callable[[Path], None] | None = None,
) -> str:
    """
    Transform a checkpoint for another mesh, and return a table of the result.

    Args:
        add_files: see `transform_checkpoint`.
    """
    placement = placement_for(mesh, strategy)
    done = transform_checkpoint(Path(source), Path(target), placement, add_files)
    rows = [("rank", "bytes", "from the files of ranks")]
    rows += [
        (str(rank), f"{count:,}", format_ranks(done.needed[rank]))
        for rank, count in done.nbytes.items()
    ]
    return f"{done.folder}: {placement.grid.size} ranks ({placement.grid})\n{format_table(rows)}"


def convert_layout_file(path: str, to: str) -> str:
    """Return a layout file in another format: ``pdrun`` or ``mindspore``."""
    found = read_placement(Path(path))
    if to == "pdrun":
        return found.to_json()
    return json.dumps(to_mindspore(found), indent=2) + "\n"
