"""Damaged and hostile checkpoints: refused in bounded time, by name, and never obeyed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError, PdrunError
from pdrun.parallel.checkpoint import describe, regions, safetensors, storage
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, full_region, iter_spans
from pdrun.parallel.checkpoint.storage import TensorPiece

pytestmark = pytest.mark.torch

Entries = list[dict[str, Any]]
Edit = Callable[[dict[str, Any], Entries], Any]
RUN = {"format": 2, "steps": 7, "position": [1, 2], "seed": 3, "world": 1, "groups": []}


def write(folder: Path) -> Path:
    """Write a checkpoint of two tensors; return its folder."""
    made = folder / "old" / "step-00000007"
    made.mkdir(parents=True)
    tensors = {"weights/w": torch.arange(32.0).view(8, 4), "rng/0": torch.zeros(5).byte()}
    pieces = [
        (TensorPiece.for_region(name, one.dtype, full_region(one.shape)), one)
        for name, one in tensors.items()
    ]
    storage.write_rank(made, 0, pieces)
    storage.write_json(made / "run.json", {**RUN, "indices": ["rank-00000.json"]})
    return made


def damage(folder: Path, edit: Edit) -> None:
    run = json.loads((folder / "run.json").read_text())
    entries = json.loads((folder / "rank-00000.json").read_text())
    edit(run, entries)
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "rank-00000.json").write_text(json.dumps(entries))


def outcomes(folder: Path) -> list[str]:
    """Return what showing and transforming a checkpoint say; only errors of pdrun are caught."""
    found = []
    target = folder.parent.parent / "new"
    for call in (
        lambda: describe.show_checkpoint(str(folder), "tp=2"),
        lambda: describe.transform_and_report(str(folder), str(target), "dp=2", ""),
    ):
        try:
            call()
            found.append("")
        except PdrunError as error:
            found.append(str(error))
            assert not target.exists() or not list(target.iterdir()), "nothing is left"
    for text in found:
        assert text.isprintable(), text
    return found


VALUES: dict[str, list[Any]] = {
    "file": ["../../../etc/passwd", "/etc/passwd", "", "..", 5, "a\0b", "rank-1.bin/..", None],
    "name": [["a"], "", 5, None],
    "shape": [[10**15], [10**30], [-8, 4], "84", [8.0, 4.0], [1] * 10000, None, [True, 4], [8]],
    "offset": [-64, 1 << 63, "0", float("inf"), None, 64, 1.0],
    "start": [30.5, "0", -5, 99, None],
    "stop": [10**12, "9", -1, 33, None, 1 << 70],
    "dtype": ["object", "__class__", [], "float999", None],
    "crcs": ["abc", [], 5, [0, 0], ["0"], [-1], [1 << 70]],
    "ranges": [
        *([[[0, 8]], [[0, 99]]], "abc", [[[[0]]]], [[[0, 8]]], [[[0, 8]], [[3, 1]]]),
        *([[[0, 8]], [[0, 3], [1, 4]]], [[[0, 8]], [[-1, 3]]], [[0, 8], [0, 4]], 7),
    ],
    "crc": ["x", -1, None],
    "__class__": ["x"],
}


@pytest.mark.parametrize("field", VALUES)
def test_a_wrong_value_in_an_index_is_refused(tmp_path: Path, field: str) -> None:
    for number, value in enumerate(VALUES[field]):
        folder = write(tmp_path / str(number))
        damage(folder, lambda _, entries, value=value: entries[0].update({field: value}))
        assert all(outcomes(folder)), (field, value)


def huge_shape(_: dict[str, Any], entries: Entries) -> None:
    size = 10**15
    entries[0].update(shape=[size, 1], stop=size, crcs=None, ranges=None)


def huge_rows(_: dict[str, Any], entries: Entries) -> None:
    entries[0].update(shape=[10**15, 4], ranges=[[[0, 10**15]], [[0, 1]]], stop=8, crcs=[0])


EDITS: dict[str, Edit] = {
    "another shape of a second piece": lambda _, e: e.append({**e[0], "shape": [4, 8]}),
    "a missing field": lambda _, e: e[0].pop("stop"),
    "no entry": lambda _, e: e.__setitem__(0, 5),
    "no elements": lambda _, e: e[0].update(stop=0, crcs=[]),
    "huge shape": huge_shape,
    "huge rows": huge_rows,
    "indices outside": lambda r, _: r.update(indices=["../../../../etc/passwd"]),
    "indices absolute": lambda r, _: r.update(indices=["/etc/hostname"]),
    "indices text": lambda r, _: r.update(indices="rank"),
    "indices twice": lambda r, _: r.update(indices=["rank-00000.json"] * 2),
    "indices missing": lambda r, _: r.pop("indices"),
    "indices of objects": lambda r, _: r.update(indices=[{}]),
    "steps text": lambda r, _: r.update(steps="x"),
    "steps huge": lambda r, _: r.update(steps=10**400),
    "steps missing": lambda r, _: r.pop("steps"),
    "position": lambda r, _: r.update(position=[1]),
    "position of text": lambda r, _: r.update(position=["1", "2"]),
    "seed": lambda r, _: r.update(seed=None),
    "world": lambda r, _: r.update(world=-1),
    "groups": lambda r, _: r.update(groups=["x"]),
    "groups missing": lambda r, _: r.update(groups=None),
    "scheduler": lambda r, _: r.update(scheduler=[1]),
    "scale": lambda r, _: r.update(scale=["x", "y"]),
    "made": lambda r, _: r.update(made=[1]),
    "made without kinds": lambda r, _: r.update(made={}),
    "members": lambda r, _: r.update(made={"optimizer": "A", "scheduler": None, "members": [[1]]}),
    "format": lambda r, _: r.update(format=99),
    "format list": lambda r, _: r.update(format=[]),
    "format true": lambda r, _: r.update(format=True),
    "format text": lambda r, _: r.update(format="\x1b[31m"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path)
    damage(folder, EDITS[name])
    assert all(outcomes(folder)), name


@pytest.mark.parametrize("name", ["run.json", "rank-00000.json", "rank-00000.bin"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "missing", "pickle", "cut", "nul"])
def test_only_regular_files_of_the_format_are_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = write(tmp_path)
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "pickle":
            path.write_bytes(pickle.dumps(print) + bytes(1000))
        case "cut":
            path.write_bytes(data[:10])
        case "nul":
            path.write_bytes(bytes(1000))
    shown, transformed = outcomes(folder)
    assert transformed
    assert shown or name == "rank-00000.bin"  # what it contains is read by the transform


def test_names_are_escaped_and_huge_files_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path)
    evil = "weights/\x1b]0;x\x07\x1b[31m\ud800\n"
    damage(folder, lambda _, entries: entries[0].update(name=evil))
    text = describe.show_checkpoint(str(folder))
    assert "weights/\\x1b]0;x\\x07\\x1b[31m\\ud800\\n" in text and "\x1b" not in text
    assert json.loads(describe.show_checkpoint(str(folder), as_json=True))["tensors"][evil]
    with pytest.raises(ConfigError, match=re.escape("has no w\\x1b")):
        CheckpointReader(folder).shape_of("w\x1b")
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 100)
    with pytest.raises(ConfigError, match="is larger than"):
        CheckpointReader(folder)


def test_a_tensor_without_memory_for_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path)

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("not enough memory")

    reader = CheckpointReader(folder)
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match="no memory for the 128 bytes of weights/w"):
        reader.read_tensor("weights/w")


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MAX_ROWS", 5)
    ranges = (((0, 6),), ((0, 1),))
    with pytest.raises(ConfigError, match="too many rows"):
        list(iter_spans(Region((6, 2), ranges, 0, 6)))


def test_a_layout_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    for call in (
        lambda: describe.convert_layout_file(str(tmp_path / "plan.json"), "pdrun"),
        lambda: describe.show_checkpoint(
            str(write(tmp_path)), strategy=str(tmp_path / "plan.json")
        ),
    ):
        with pytest.raises(ConfigError, match="not a regular file"):
            call()


HEADER = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "edit",
    [
        {"w": 5},
        {"w": {**HEADER["w"], "shape": [-2]}},
        {"w": {**HEADER["w"], "shape": [-2, -1]}},
        {"w": {**HEADER["w"], "shape": [10**30, 0]}},
        {"w": {**HEADER["w"], "shape": [1e999]}},
        {"w": {**HEADER["w"], "shape": "2"}},
        {"w": {**HEADER["w"], "dtype": []}},
        {"w": {**HEADER["w"], "data_offsets": [0, 80]}},
        {"w": {**HEADER["w"], "data_offsets": [0]}},
        {"w": {**HEADER["w"], "data_offsets": ["a", "b"]}},
        {"w": {**HEADER["w"], "dtype": "\x1b[31m"}},
        [],
        "deep",
    ],
    ids=str,
)
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, edit: Any) -> None:
    path = tmp_path / "x.safetensors"
    text = b"[" * 100_000 if edit == "deep" else json.dumps(edit).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match="is not a safetensors file") as caught:
        safetensors.SafetensorsFile(path)
    assert str(caught.value).isprintable()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        safetensors.SafetensorsFile(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path)
    before = copy.deepcopy(json.loads((folder / "rank-00000.json").read_text()))
    assert outcomes(folder) == ["", ""]
    assert before == json.loads((folder / "rank-00000.json").read_text())
