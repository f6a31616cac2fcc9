"""What `offline` finds and does, in words: behind ``pdrun checkpoint``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdrun.parallel.checkpoint.reader import Reader
from pdrun.parallel.checkpoint.transform import (
    find,
    placement_for,
    rank_lists,
    rank_of,
    read_placement,
    transform,
)
from pdrun.parallel.layouts.mindspore import to_mindspore


def describe(reader: Reader) -> dict[str, Any]:
    """Return what is in a checkpoint, as plain data."""
    tensors = {}
    for name in reader.names():
        pieces = reader.pieces(name)
        tensors[name] = {
            "shape": list(reader.shape(name)),
            "type": pieces[0].dtype,
            "parts": len({piece.box for piece in pieces}),
            "ranks": sorted({rank_of(piece) for piece in pieces}),
        }
    run = reader.run
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


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def show(source: str, mesh: str = "", strategy: str = "", as_json: bool = False) -> str:
    """
    Return what is in a checkpoint and, with a mesh or a file of layouts, which ranks' files each
    rank needs.
    """
    reader = Reader(find(Path(source)))
    told = describe(reader)
    lists = rank_lists(reader, placement_for(mesh, strategy)) if mesh or strategy else None
    if as_json:
        return json.dumps({**told, **({"needs": lists} if lists is not None else {})})
    head = f"{told['folder']}: step {told['steps']}, epoch {told['epoch']}, saved by {told['ranks']} ranks"
    rows = [("tensor", "type", "shape", "parts", "in the files of ranks")]
    for name, one in told["tensors"].items():
        shape = " x ".join(map(str, one["shape"])) or "-"
        rows.append((name, one["type"], shape, str(one["parts"]), spans(one["ranks"])))
    return "\n".join([head, table(rows), *([needs(lists)] if lists is not None else [])])


def needs(lists: Mapping[int, list[int]]) -> str:
    """Return lists of ranks as lines."""
    return table(
        [
            ("rank", "needs the files of ranks"),
            *((str(rank), spans(found)) for rank, found in lists.items()),
        ]
    )


def spans(numbers: list[int]) -> str:
    """Return ascending numbers in short: 0-3, 6."""
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


def transformed(source: str, target: str, mesh: str, strategy: str) -> str:
    """Lay a checkpoint out for another mesh, and return what was done."""
    placement = placement_for(mesh, strategy)
    done = transform(Path(source), Path(target), placement)
    rows = [("rank", "bytes", "from the files of ranks")]
    rows += [
        (str(rank), f"{count:,}", spans(done.needed[rank])) for rank, count in done.nbytes.items()
    ]
    return f"{done.folder}: {placement.grid.size} ranks ({placement.grid})\n{table(rows)}"


def converted(path: str, to: str) -> str:
    """Return a file of layouts in another form: ``pdrun`` or ``mindspore``."""
    found = read_placement(Path(path))
    if to == "pdrun":
        return found.to_json()
    return json.dumps(to_mindspore(found), indent=2) + "\n"
