"""Weights for inference: from checkpoints of any mesh and safetensors, each rank its slices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError
from pdrun.parallel.comm import mesh
from pdrun.parallel.inference.infer import infer
from pdrun.parallel.inference.sources import CheckpointSource, SafetensorsSource, open_source
from pdrun.parallel.model.shards import Shard, full_shard
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.tensor import strategy_for
from tests.lib.causal_models import build_causal, prompts
from tests.lib.rank_pool import Worlds

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.torch
RANK_IMPORTS = ("transformers", "tests.parallel.inference.test_loading")
WRONG = "model.layers.0.mlp.up_proj.weight"


def generate_from(kind: str, degrees: dict[str, int], folder: str, **options: Any) -> Any:
    model = build_causal(kind, empty=True)
    devices = mesh.make_mesh(**degrees)
    served = infer(model, mesh=devices, weights=folder, timeout=30.0, **options)
    return served.generate(prompts(), 6)


def expected(kind: str) -> Any:
    return infer(build_causal(kind)).generate(prompts(), 6)


def train_and_save(degrees: dict[str, int], level: int, folder: str) -> Any:
    """Save a trained model, and return what it generates."""
    model = build_causal("llama")
    tensor = degrees.get("tp", 1) > 1
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.5),
        lambda output, batch: output.loss,
        mesh=mesh.make_mesh(**degrees),
        strategy=strategy_for(model) if tensor else None,
        optimizer_level=level,
    )
    ids = torch.tensor([prompts()[0]] * 2)
    run.step({"input_ids": ids, "labels": ids})
    run.save(folder)


@pytest.fixture
def shards(tmp_path: Path) -> Callable[[str], Path]:
    """Save a model as several safetensors files with their index."""

    def save(kind: str) -> Path:
        folder = tmp_path / kind
        build_causal(kind).save_pretrained(folder, max_shard_size="20KB")
        return folder

    return save


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("llama", ({"tp": 2}, {"dp": 2})),
        ("qwen2", ({"tp": 2}, {"pp": 2})),  # whose head is tied, on another stage
        ("gpt2", ({"tp": 2},)),
        ("mixtral", ({"ep": 2},)),
    ],
)
def test_safetensors_in_files_are_read_by_slices(
    kind: str, meshes: tuple[dict[str, int], ...], shards: Callable[[str], Path], worlds: Worlds
) -> None:
    folder = shards(kind)
    assert len(list(folder.glob("*.safetensors"))) > 2
    wanted = expected(kind)
    assert generate_from(kind, {}, str(folder)) == wanted
    for degrees in meshes:
        assert worlds(2).run(generate_from, kind, degrees, str(folder)) == [wanted] * 2


@pytest.mark.parametrize(("degrees", "level"), [({"tp": 2}, 0), ({"dp": 2}, 3), ({}, 0)], ids=str)
def test_checkpoints_of_any_mesh_are_read(
    degrees: dict[str, int], level: int, tmp_path: Path, worlds: Worlds
) -> None:
    folder = str(tmp_path)
    if degrees:
        worlds(2).run(train_and_save, degrees, level, folder)
    else:
        train_and_save({}, level, folder)
    wanted = generate_from("llama", {}, folder)
    assert wanted != expected("llama")
    assert worlds(2).run(generate_from, "llama", {"tp": 2}, folder) == [wanted] * 2


def test_a_rank_reads_its_slices_only(
    shards: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(shards("llama"))
    assert isinstance(source, SafetensorsSource)
    rows, columns = source.shape_of(WRONG)
    full = source.read_shard(WRONG, full_shard(torch.empty(rows, columns, device="meta")))
    half = Shard((rows, columns), full_shard(full).layout, (((0, rows),), ((8, 16), (24, 32))))
    monkeypatch.setattr("pdrun.parallel.checkpoint.safetensors.SafetensorsFile.read_tensor", None)
    found = source.read_shard(WRONG, half)
    assert torch.equal(found, torch.cat([full[:, 8:16], full[:, 24:32]], 1))
    assert found.untyped_storage().nbytes() == found.nbytes == full.nbytes // 2


def test_a_base_model_is_read_into_one_with_a_head(tmp_path: Path) -> None:
    model = build_causal("gpt2")  # the head is tied to the embedding
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in open_source(tmp_path).names()
    assert generate_from("gpt2", {}, str(tmp_path)) == expected("gpt2")


def test_weights_get_the_type_that_is_asked_for(shards: Callable[[str], Path]) -> None:
    model = build_causal("llama", empty=True)
    infer(model, weights=shards("llama"), dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert not any(param.requires_grad for param in model.parameters())


def test_tensors_without_a_place_are_named(
    shards: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shards("llama")
    extra = {"model.extra.weight": torch.zeros(3)}
    __import__("safetensors.torch").torch.save_file(extra, folder / "extra.safetensors")
    edit_index(folder, lambda placed: placed.update({"model.extra.weight": "extra.safetensors"}))
    assert generate_from("llama", {}, str(folder)) == expected("llama")
    assert "the model does not use model.extra.weight" in capfd.readouterr().err


# ---- what is wrong with weights -----------------------------------------------


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def file_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def truncate(folder: Path) -> str:
    path = file_with(folder, WRONG)
    path.write_bytes(path.read_bytes()[:-10])
    return "it is truncated: "


def reshape(folder: Path) -> str:
    tools = __import__("safetensors.torch").torch
    path = file_with(folder, WRONG)
    tensors = tools.load_file(path)
    tensors[WRONG] = torch.zeros(7, 32)
    tools.save_file(tensors, path)
    return f"{WRONG} in {path.name} has the shape [7, 32], the model's has [48, 32]"


def quantise(folder: Path) -> str:
    tools = __import__("safetensors.torch").torch
    path = file_with(folder, WRONG)
    tensors = tools.load_file(path)
    tensors[WRONG] = tensors[WRONG].to(torch.int8)
    tools.save_file(tensors, path)
    return "quantised weights are not supported"


def narrow(folder: Path) -> str:
    tools = __import__("safetensors.torch").torch
    path = file_with(folder, WRONG)
    tensors = tools.load_file(path)
    tensors[WRONG] = tensors[WRONG].to(torch.float8_e4m3fn)
    tools.save_file(tensors, path)
    return f"{WRONG} in {path.name} has the type torch.float8_e4m3fn"


def overlap(folder: Path) -> str:
    path = file_with(folder, WRONG)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    other = next(name for name in header if name not in ("__metadata__", WRONG))
    header[WRONG] = header[other]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return "have the same bytes"


def name_as_safetensors(folder: Path) -> str:
    path = file_with(folder, WRONG)
    torch.save({"weight": torch.zeros(3)}, path)
    return f"{path.name}: is a file of torch.save, which can run code when it is read"


def leave_pickles_only(folder: Path) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    weights = {"weight": torch.zeros(3)}
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return "pytorch_model.bin: is a file of torch.save"


def link_to_text(folder: Path) -> str:
    path = file_with(folder, WRONG)
    path.unlink()
    path.symlink_to(__file__)
    return f"{path.name}: is not a safetensors file"


def name_a_pipe(folder: Path) -> str:
    path = file_with(folder, WRONG)
    path.unlink()
    os.mkfifo(path)
    return "is not a regular file"


def name_escapes(folder: Path) -> str:
    edit_index(folder, lambda placed: placed.update({WRONG: "\x1b[31m.safetensors"}))
    return "which is not a safetensors file of this folder"


def name_at_length(folder: Path) -> str:
    edit_index(folder, lambda placed: placed.update({WRONG: "a" * 5000 + ".safetensors"}))
    return "which is not a safetensors file of this folder"


def lose_a_file(folder: Path) -> str:
    path = file_with(folder, WRONG)
    path.unlink()
    return path.name


def lose_a_tensor(folder: Path) -> str:
    edit_index(folder, lambda placed: placed.pop(WRONG))
    return f"lacks 1 of the model's 21 tensors: {WRONG}"


def name_a_file_outside(folder: Path) -> str:
    edit_index(folder, lambda placed: placed.update({WRONG: "../x.safetensors"}))
    return "which is not a safetensors file of this folder"


def promise_a_tensor(folder: Path) -> str:
    other = file_with(folder, "model.norm.weight").name
    edit_index(folder, lambda placed: placed.update({"model.nom.weight": other}))
    return "has no model.nom.weight, which the index says it has"


def break_the_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[" * 9)
    return "is not a JSON file"


def empty_the_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{}")
    return "has no weight_map"


def empty_the_folder(folder: Path) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    return "has neither a complete checkpoint nor safetensors files"


DAMAGES = [
    *(truncate, reshape, quantise, lose_a_file, lose_a_tensor, name_a_file_outside),
    *(promise_a_tensor, break_the_index, empty_the_index, empty_the_folder),
    *(narrow, overlap, name_as_safetensors, leave_pickles_only, link_to_text),
    *(name_a_pipe, name_escapes, name_at_length),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_weights_are_named(
    damage: Callable[[Path], str], shards: Callable[[str], Path]
) -> None:
    folder = shards("llama")
    text = damage(folder)
    with pytest.raises(ConfigError) as caught:
        generate_from("llama", {}, str(folder))
    told = str(caught.value)
    assert text in told
    assert str(folder) in told
    assert "\n" not in told and told.isprintable() and len(told) < 1000


def test_every_rank_reports_the_error_of_one(shards: Callable[[str], Path], worlds: Worlds) -> None:
    folder = shards("llama")
    text = reshape(folder)
    for kind, told in worlds(2).failures(generate_from, "llama", {"tp": 2}, str(folder)):
        assert (kind, text in told) == ("ConfigError", True)


def test_a_path_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_source(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is neither a file nor a folder"):
        open_source(tmp_path / "pipe")
    (tmp_path / "text.safetensors").write_text("no header")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        open_source(tmp_path / "text.safetensors")


def test_weights_that_are_not_finite_are_an_error_of_their_prompts(
    shards: Callable[[str], Path],
) -> None:
    folder = shards("llama")
    tools = __import__("safetensors.torch").torch
    path = file_with(folder, WRONG)
    tensors = tools.load_file(path)
    tensors[WRONG][3, 3] = float("nan")
    tools.save_file(tensors, path)
    with pytest.raises(ConfigError, match="the logits of prompt 0, 1, 2 are not finite"):
        generate_from("llama", {}, str(folder))


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    train_and_save({}, 0, str(tmp_path))
    source = open_source(tmp_path)
    assert isinstance(source, CheckpointSource)
    (data,) = Path(source.place).glob("rank-*.bin")
    content = bytearray(data.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    data.write_bytes(content)
    with pytest.raises(ConfigError, match="has a wrong checksum"):
        generate_from("llama", {}, str(tmp_path))
