"""Where torch's store listens: the user's choice, a port in the script, or any port."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, Program, Resources
from pdrun.launcher.plan.plan import make_plan
from pdrun.launcher.plan.script_scan import scan_script
from tests.launcher.plan.test_plan_invariants import FACTS

NETWORK = replace(
    FACTS,
    hostname="h1",
    addresses=(("lo", "127.0.0.1"), ("eth0", "10.0.0.1")),
    route_address="10.0.0.1",
    is_scheduler_local=True,
)


def store_of(nodes: int = 1, facts: object = FACTS, **place: object) -> str | None:
    """Return where this node serves the store."""
    spec = JobSpec(
        Program("script", "train.py"),
        Resources(nodes=nodes, devices=1, backend="cpu"),
        place=ClusterOptions(**place),  # type: ignore[arg-type]
    )
    sources = {"place.store": "--master-port"}
    plan = make_plan(spec, facts, sources)  # type: ignore[arg-type]
    return str(plan.store.endpoint) if plan.store else None


def test_one_node_listens_on_loopback_or_where_the_user_wants() -> None:
    assert store_of() is None
    assert store_of(store=Endpoint("", 29517)) == "127.0.0.1:29517"
    here = replace(FACTS, is_store_local=True)
    assert store_of(facts=here, store=Endpoint("h1", 29517)) == "h1:29517"
    assert store_of(facts=here, store=Endpoint("h1", 0)) == "h1:0"
    assert store_of(store=Endpoint("0.0.0.0", 29517)) == "127.0.0.1:29517"
    assert store_of(store=Endpoint("not-in-dns", 29517)) == "127.0.0.1:29517"


def test_node_0_alone_has_the_port() -> None:
    place = {"scheduler": Endpoint("h1", 19517), "store": Endpoint("h1", 29517)}
    facts = replace(NETWORK, is_store_local=True)
    assert store_of(2, facts, node_rank=0, **place) == "h1:29517"
    assert store_of(2, facts, node_rank=1, **place) is None
    assert store_of(2, facts, **place) == "h1:29517"  # it runs the scheduler
    loopback = replace(facts, is_store_loopback=True)
    assert store_of(2, loopback, node_rank=0, **place) == "10.0.0.1:29517"
    elsewhere = replace(NETWORK, is_scheduler_local=False)
    assert store_of(2, elsewhere, **place) is None


def test_without_ranks_the_node_of_the_scheduler_is_node_0() -> None:
    spec = JobSpec(
        Program("script", "train.py"),
        Resources(nodes=2, devices=1, backend="cpu"),
        place=ClusterOptions(scheduler=Endpoint("h1", 19517), store=Endpoint("h1", 29517)),
    )
    assert make_plan(spec, NETWORK, {}).spec.place.node_rank == 0


@pytest.mark.parametrize(("nodes", "hint"), [(1, "set the number of nodes"), (2, "use an address")])
def test_an_address_of_another_machine_is_refused(nodes: int, hint: str) -> None:
    facts = replace(NETWORK, is_store_local=False)
    place = {"scheduler": Endpoint("h1", 9), "node_rank": 0} if nodes == 2 else {}
    with pytest.raises(ConfigError, match=r"store cannot listen on h9: .*h1") as caught:
        store_of(nodes, facts, store=Endpoint("h9", 29517), **place)
    assert caught.value.where == "--master-port"
    assert hint in caught.value.hint


SCRIPTS = [
    ("dist.init_process_group('gloo', init_method='tcp://localhost:29500')", 29500),
    ('init_process_group(backend="nccl",init_method="tcp://127.0.0.1:23456", rank=r)', 23456),
    ('os.environ["MASTER_PORT"] = "12355"', 12355),
    ("os.environ['MASTER_PORT']=str(29501)", 29501),
    ("os.environ.setdefault('MASTER_PORT', '12355')", 0),
    ("socket.bind('tcp://127.0.0.1:5555')", 0),
    ("# init_method='tcp://localhost:29500'", 0),
    ("dist.init_process_group(init_method='tcp://10.0.0.9:29500')", 0),
    ("init_method='tcp://localhost:99999'", 0),
    ("init_method=f'tcp://localhost:{port}'", 0),
]


@pytest.mark.parametrize(("line", "port"), SCRIPTS)
def test_a_port_in_the_script_is_the_stores(line: str, port: int) -> None:
    found = scan_script(Path("/nowhere/train.py"), f"import torch\n\n{line}\n".encode())
    assert found.store_port == port
    assert found.store_source == ("train.py:3" if port else "")
    without_torch = scan_script(Path("/nowhere/train.py"), line.encode())
    assert without_torch.store_port == 0
    facts = replace(FACTS, script_store_port=port, script_store_source=found.store_source)
    assert store_of(facts=facts) == (f"127.0.0.1:{port}" if port else None)
    assert store_of(facts=facts, store=Endpoint("", 7)) == "127.0.0.1:7"
