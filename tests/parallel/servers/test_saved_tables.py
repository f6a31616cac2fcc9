"""`pdrun checkpoint` with tables of servers: shown, exported, and for another number of servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli.checkpoint import checkpoint_group
from pdrun.parallel.checkpoint.safetensors import SafetensorsFile
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.settings import dense, rows
from pdrun.parallel.servers.sharding import PIECE_ELEMENTS
from pdrun.parallel.servers.tables import describe

from .served import serving

pytestmark = pytest.mark.torch

IDS = torch.tensor([-(2**40), -3, 0, 5, 2**33, 2**50])
SIZE = 2 * PIECE_ELEMENTS + 5


def add_tables(client: ServerClient) -> None:
    client.add_rows("users", rows("adagrad", lr=0.5), dim=3)
    client.add_dense("head", dense("momentum", lr=1.0), torch.zeros(SIZE))


def train(client: ServerClient) -> None:
    made = torch.Generator().manual_seed(1)
    for _ in range(2):
        client.push_rows("users", IDS, torch.randn(len(IDS), 3, generator=made))
        client.push("head", torch.randn(SIZE, generator=made))
        client.clock()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A folder of two servers, the rows of IDS, and the dense weight."""
    with serving(tmp_path, 2) as running:
        client = running.connect()
        add_tables(client)
        train(client)
        client.save(tmp_path / "saved")
        found = client.rows("users", IDS), client.pull("head")
        client.close()
    return tmp_path / "saved", *found


def test_shown(saved) -> None:
    text = describe.show_with_tables(str(saved[0]), "", "", False)
    assert "step 2, tables of 2 server(s)" in text
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["users", "rows", "6", "3", "adagrad", "1"],
        ["head", "dense", f"{SIZE:,}", "-", "momentum", "1"],
    ]
    data = json.loads(describe.show_with_tables(str(saved[0]), "", "", True))
    assert data["servers"] == 2
    assert data["tables"]["users"]["rows"] == 6
    with pytest.raises(UsageError, match="tables of servers only"):
        describe.show_with_tables(str(saved[0]), "dp=2", "", False)


@pytest.mark.parametrize("with_state", [False, True])
def test_exported(saved, with_state, tmp_path) -> None:
    folder, user_rows, head = saved
    path = tmp_path / "tables.safetensors"
    options = ["export", str(folder), str(path), *(["--state"] if with_state else [])]
    done = CliRunner().invoke(checkpoint_group(), options, standalone_mode=False)
    assert done.return_value == 0
    assert "2 table(s) of step 2" in done.output
    file = SafetensorsFile(path)
    assert torch.equal(file.read_tensor("users.ids"), IDS)
    assert torch.equal(file.read_tensor("users"), user_rows)
    assert torch.equal(file.read_tensor("head"), head)
    assert ("users.state0" in file.entries) is with_state
    with pytest.raises(UsageError, match="must be a file with the suffix"):
        describe.export_tables(str(folder), str(tmp_path / "other"), False)


@pytest.mark.parametrize("servers", [1, 3, 5])
def test_for_another_number_of_servers(saved, tmp_path, servers) -> None:
    """The new files are those that such servers write; training continues with the same values."""
    folder = saved[0]
    text = describe.transform_with_tables(str(folder), str(tmp_path / "new"), "", "", servers)
    assert f"2 table(s) for {servers} server(s)" in text
    assert len(list((tmp_path / "new").glob("server-*.safetensors"))) == servers
    found = []
    for place in (folder, tmp_path / "new"):
        with serving(tmp_path, servers) as running:
            client = running.connect()
            add_tables(client)
            client.load(place)
            train(client)
            client.save(tmp_path / f"again-{place.name}")
            found.append((client.rows("users", IDS), client.pull("head")))
            client.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    names = sorted(path.name for path in (tmp_path / "again-new").iterdir())
    assert len(names) == 2 * servers
    for name in names:
        if name.endswith(".safetensors"):
            mine, theirs = (tmp_path / f"again-{one}" / name for one in ("new", "saved"))
            assert mine.read_bytes() == theirs.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        describe.transform_with_tables(str(folder), str(tmp_path / "new"), "", "", servers)


class Clicks(nn.Module):
    """A table on servers and a weight that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.users = pdrun.ServedEmbedding("users", 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.users(ids)).squeeze(1)


def test_a_checkpoint_of_a_run_keeps_its_tables(tmp_path: Path) -> None:
    def make_run() -> pdrun.Run:
        torch.manual_seed(0)
        return parallelize(
            Clicks(),
            lambda params: torch.optim.SGD(params, 0.1),
            lambda output, batch: ((output - 1.0).square().sum(), torch.tensor(4.0)),
            servers=pdrun.Servers({"users": pdrun.rows("adagrad", lr=0.1)}),
        )

    run = make_run()
    batch = torch.tensor([3, 9, 2**40, 3])
    run.step(batch)
    run.save(tmp_path / "runs")
    want = run.step(batch).loss
    show = CliRunner().invoke(checkpoint_group(), ["show", str(tmp_path / "runs")])
    assert "head.weight" in show.output
    assert "users  rows  3" in show.output
    source = str(tmp_path / "runs")
    for number, options in enumerate((["--servers", "2"], ["--mesh", "dp=2"])):
        target = tmp_path / f"new-{number}"
        words = ["transform", source, str(target), *options]
        done = CliRunner().invoke(checkpoint_group(), words, standalone_mode=False)
        assert done.return_value == 0, done.exception
        again = make_run()
        again.load(target / "step-00000001")
        assert again.step(batch).loss == want


def test_what_is_refused(saved, tmp_path) -> None:
    folder = saved[0]
    for servers, text in ((0, "1 to 1024"), (2000, "1 to 1024")):
        with pytest.raises(UsageError, match=text):
            describe.transform_with_tables(str(folder), str(tmp_path / "x"), "", "", servers)
    with pytest.raises(UsageError, match="pass --servers N"):
        describe.transform_with_tables(str(folder), str(tmp_path / "x"), "", "", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        describe.export_tables(str(tmp_path / "empty"), str(tmp_path / "a.safetensors"), False)
    whole = (folder / "server-00001.json").read_text()
    for damaged in (whole.replace('"dim": 3', '"dim": 4'), whole.replace('"kind"', '"kin"'), "{"):
        (folder / "server-00001.json").write_text(damaged)
        with pytest.raises(ConfigError, match="checkpoint of parameter servers"):
            describe.show_with_tables(str(folder), "", "", False)
    (folder / "server-00001.json").unlink()
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        describe.export_tables(str(folder), str(tmp_path / "a.safetensors"), False)
