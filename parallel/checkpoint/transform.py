"""
Checkpoints without a job: contents, the files that each rank needs, and transforms for another
mesh.

Any mesh loads any checkpoint if every rank sees all files. In a transformed checkpoint each rank's
own file has what that rank would save, so that files can be distributed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from pdrun.errors import ConfigError, UsageError, did_you_mean
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.index import check_run
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, count_elements, full_region
from pdrun.parallel.checkpoint.storage import TensorPiece, read_json
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.mindspore import from_mindspore, is_mindspore
from pdrun.parallel.layouts.placement import Placement, ShardRanges

MAX_RANKS = 2**16
"""Every rank of a mesh is looked at; no job has more."""
WEIGHTS_PREFIX = "weights/"
STATE_PREFIX = "state/"


# ---- input ------------------------------------------------------------------


def find_checkpoint(folder: Path) -> Path:
    """
    Return the folder of a checkpoint: the given one, or the newest complete one in it.

    Raises:
        ConfigError: there is no complete checkpoint.
    """
    if (folder / "run.json").is_file():
        return folder
    found = storage.list_checkpoints(folder)
    if not found:
        what = "has no complete checkpoint" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            what, where=str(folder), hint="pass a folder of run.save, or a step in it"
        )
    return found[-1]


def read_placement(path: Path) -> Placement:
    """
    Return the placement in a file: a run's plan, or a strategy file of MindSpore in JSON.

    Raises:
        ConfigError: it cannot be read, or is neither.
    """
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read as JSON ({error})", where=str(path)) from None
    if is_mindspore(value):
        return from_mindspore(value, str(path))
    return Placement.from_plain(value, str(path))


def read_mesh(text: str) -> Grid:
    """
    Return the mesh of a text such as ``dp=2,tp=4``.

    Raises:
        UsageError: the text is not a list of AXIS=COUNT.
    """
    degrees: dict[str, int] = {}
    for word in text.split(","):
        matched = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*", word)
        if matched is None or int(matched[2]) < 1:
            raise UsageError(
                f"must be a list of AXIS=COUNT, got {word!r}",
                where="--mesh",
                hint="--mesh dp=2,tp=4",
            )
        if matched[1] in degrees:
            raise UsageError(f"axis {matched[1]} is listed twice", where="--mesh")
        degrees[matched[1]] = int(matched[2])
    return make_mesh(**degrees).grid


def placement_for(mesh: str, strategy: str) -> Placement:
    """
    Return the placement on a mesh, with the layouts of a file.

    Args:
        mesh: as in `read_mesh`; empty: the file's.
        strategy: path of the file; empty: all weights are replicated.

    Raises:
        UsageError: neither is given, or the mesh has too many ranks.
        ConfigError: the file names an axis that the mesh lacks.
    """
    if not mesh and not strategy:
        raise UsageError(
            "a mesh or a layout file is required",
            hint="--mesh dp=2,tp=2 or --strategy FILE",
        )
    found = read_placement(Path(strategy)) if strategy else None
    grid = read_mesh(mesh) if mesh or found is None else found.grid
    if grid.size > MAX_RANKS:
        raise UsageError(
            f"({grid}) has {grid.size} ranks, at most {MAX_RANKS} are supported",
            where="--mesh" if mesh else strategy,
        )
    return Placement(grid, found.weights if found is not None else {})


# ---- placement --------------------------------------------------------------


@dataclass(frozen=True)
class PlacedRegion:
    """A part of a tensor, the ranks of the new mesh that have it, and the rank that saves it."""

    name: str
    region: Region
    ranks: tuple[int, ...]
    saving_rank: int


def place_tensors(reader: CheckpointReader, placement: Placement) -> Iterator[PlacedRegion]:
    """
    Yield all parts of all tensors of a checkpoint as they are placed on another mesh.

    One rank saves each set of replicas, a different rank for each weight, as a run does.

    Raises:
        ConfigError: the placement has weights that the checkpoint lacks, or of another shape.
    """
    shapes = weight_shapes(reader)
    for name in placement.weights:
        if name not in shapes:
            hint = did_you_mean(name, shapes) or "the file belongs to another model"
            raise ConfigError(f"has no weight {name}", where=str(reader.folder), hint=hint)
    ranks = tuple(range(placement.grid.size))
    turns = {weight: turn for turn, weight in enumerate(shapes)}
    parts_of: dict[str, dict[ShardRanges, list[int]]] = {}
    for name in reader.tensor_names():
        shape = reader.shape_of(name)
        weight = weight_name_of(name)
        if (
            weight not in shapes
        ):  # a buffer or a random state: one for all, the latter kept by its own rank
            number = name.rpartition("/")[2]
            yield PlacedRegion(
                name, full_region(shape), ranks, int(number) % len(ranks) if number.isdigit() else 0
            )
            continue
        if weight not in parts_of:
            parts_of[weight] = placement.holders_of(weight, shapes[weight])
        if shape != shapes[weight]:  # a count of steps: with the first part
            yield PlacedRegion(
                name, full_region(shape), ranks, next(iter(parts_of[weight].values()))[0]
            )
            continue
        for part, alike in parts_of[weight].items():
            region = Region(shape, part, 0, count_elements(part))
            yield PlacedRegion(name, region, tuple(alike), alike[turns[weight] % len(alike)])


def weight_name_of(name: str) -> str:
    """Return the weight that a tensor of a checkpoint belongs to; empty for none."""
    if name.startswith(WEIGHTS_PREFIX):
        return name.removeprefix(WEIGHTS_PREFIX)
    if name.startswith(STATE_PREFIX):
        return name.removeprefix(STATE_PREFIX).rpartition("/")[0]
    return ""


def weight_shapes(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all full weights of a checkpoint."""
    return {
        weight_name_of(name): reader.shape_of(name)
        for name in reader.tensor_names()
        if name.startswith(WEIGHTS_PREFIX)
    }


def needed_ranks(reader: CheckpointReader, placement: Placement) -> dict[int, list[int]]:
    """
    Return, for each rank of another mesh, the ranks whose files it needs.

    These are the files of weights, their state and buffers. Generator states are used on the same
    number of ranks only.
    """
    found: dict[int, set[int]] = {rank: set() for rank in range(placement.grid.size)}
    for share in place_tensors(reader, placement):
        if share.name.startswith("rng/"):
            continue
        files = {
            rank_of_piece(piece)
            for piece, _ in storage.find_sources(reader.pieces_of(share.name), share.region)
        }
        for rank in share.ranks:
            found[rank] |= files
    return {rank: sorted(ranks) for rank, ranks in found.items()}


def rank_of_piece(piece: TensorPiece) -> int:
    """Return the rank that wrote a piece."""
    return int(re.sub(r"\D", "", Path(piece.file).stem))


# ---- transform --------------------------------------------------------------


@dataclass(frozen=True)
class TransformResult:
    """
    A transformed checkpoint.

    Attributes:
        folder: the new checkpoint.
        nbytes: bytes of tensors in each rank's file.
        needed: for each rank, the ranks of the old checkpoint whose files it was made of.
    """

    folder: Path
    nbytes: dict[int, int]
    needed: dict[int, list[int]]


def transform_checkpoint(
    source: Path,
    target: Path,
    placement: Placement,
    add_files: Callable[[Path], None] | None = None,
) -> TransformResult:
    """
    Write a checkpoint for another mesh; one part of one tensor is in memory at a time.

    Args:
        source: a checkpoint, or a folder whose newest one is taken.
        target: the folder in which the new one appears, under the same name, when it is complete.
        placement: the new ranks, and the weights on them.
        add_files: writes more files to the new checkpoint's folder, before it appears.

    Raises:
        ConfigError: there is no complete checkpoint, or it belongs to another model.
        UsageError: the target has one of that name.
    """
    reader = CheckpointReader(find_checkpoint(source))
    check_run(reader.run_json, reader.folder)
    final = target / reader.folder.name.removeprefix(".old-")
    if final.exists():
        raise UsageError(f"{final} exists", hint="use another folder, or remove it")
    dealt: dict[int, list[PlacedRegion]] = {rank: [] for rank in range(placement.grid.size)}
    for share in place_tensors(reader, placement):
        dealt[share.saving_rank].append(share)
    needed = needed_ranks(reader, placement)
    hidden = target / f".new-{final.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create a folder in it ({error.strerror})", where=str(target)
        ) from None
    try:
        for rank, own in dealt.items():
            storage.write_rank(hidden, rank, _read_pieces(reader, own))
        if add_files is not None:
            add_files(hidden)
        names = [f"rank-{rank:05d}.json" for rank in dealt]
        storage.write_json(
            hidden / "run.json",
            {**reader.run_json, "format": storage.FORMAT_VERSION, "indices": names},
        )
        storage.publish_folder(hidden, final)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot be written ({error.strerror})", where=str(final)) from None
        raise
    nbytes = {
        rank: sum(_count_bytes(reader, share) for share in own) for rank, own in dealt.items()
    }
    return TransformResult(final, nbytes, needed)


def _read_pieces(
    reader: CheckpointReader, own: list[PlacedRegion]
) -> Iterator[tuple[TensorPiece, torch.Tensor]]:
    for share in own:
        data = reader.read_tensor(share.name, share.region)
        yield TensorPiece.for_region(share.name, data.dtype, share.region), data


def _count_bytes(reader: CheckpointReader, share: PlacedRegion) -> int:
    return share.region.numel * int(storage.DTYPES[reader.pieces_of(share.name)[0].dtype].itemsize)
