"""The contract between launcher and script."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError, UsageError
from pdrun.worker_env import WorkerEnv, refuse_reserved


@st.composite
def worker_envs(draw: st.DrawFn) -> WorkerEnv:
    world = draw(st.integers(1, 10**6))
    local = draw(st.integers(1, min(world, 64)))
    text = st.text("abc0-._", min_size=1, max_size=12)
    return WorkerEnv(
        rank=draw(st.integers(0, world - 1)),
        world_size=world,
        local_rank=draw(st.integers(0, local - 1)),
        local_world_size=local,
        node_rank=draw(st.integers(0, 99)),
        nodes=draw(st.integers(1, 99)),
        master_addr=draw(text),
        master_port=draw(st.integers(0, 65535)),
        run_id=draw(text),
        restart_count=draw(st.integers(0, 9)),
        max_restarts=draw(st.integers(0, 9)),
        generation=draw(st.integers(0, 9)),
        job=draw(text),
        node=draw(text),
        device_kind=draw(st.sampled_from(["cpu", "cuda"])),
        device_index=draw(st.integers(0, 15)),
        collective=draw(st.sampled_from(["gloo", "nccl"])),
    )


@given(worker_envs())
def test_what_the_launcher_writes_the_script_reads(env: WorkerEnv) -> None:
    assert WorkerEnv.from_env(env.to_env()) == env


def test_torchrun_variables_are_enough() -> None:
    found = WorkerEnv.from_env(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "abc",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.node_rank, found.nodes) == (
        5,
        8,
        1,
        1,
        2,
    )
    assert (found.run_id, found.restart_count, found.collective) == ("abc", 2, "")


def test_no_launcher_is_none_and_world_one_needs_no_local_rank() -> None:
    assert WorkerEnv.from_env({"HOME": "/"}) is None
    alone = WorkerEnv.from_env({"RANK": "0", "WORLD_SIZE": "1"})
    assert alone is not None and alone.local_world_size == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"RANK": None}, "RANK"),
        ({"RANK": "8"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"LOCAL_RANK": "abc"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "٣"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        ({"MASTER_PORT": " 5 "}, "MASTER_PORT"),
        ({"WORLD_SIZE": "1_0"}, "WORLD_SIZE"),
    ],
)
def test_a_broken_set_is_refused_by_name(change: dict[str, str | None], word: str) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    merged = {name: value for name, value in {**environ, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        WorkerEnv.from_env(merged)
    assert word in str(caught.value)


def test_every_field_travels() -> None:
    base = WorkerEnv(0, 2, 0, 1, 0, 2, "a", 1, "run")
    for item in dataclasses.fields(WorkerEnv):
        other = 1 if isinstance(getattr(base, item.name), int) else "zz"
        value = (
            other
            if other != getattr(base, item.name)
            else other + 1
            if isinstance(other, int)
            else other
        )
        changed = dataclasses.replace(
            base,
            **{item.name: value, **({"local_world_size": 2} if item.name == "local_rank" else {})},
        )
        assert changed.to_env() != base.to_env(), item.name


def test_variables_that_the_launcher_writes_are_its_own_and_others_are_free() -> None:
    written = set(WorkerEnv(0, 1, 0, 1, 0, 1, "h", 1, "run").to_env())
    for name in (written | {"TORCHELASTIC_ERROR_FILE", "PDRUN_WORKER_OF"}) - {"ROLE_NAME"}:
        with pytest.raises(UsageError, match=f"launch: {name} is set by pdrun"):
            refuse_reserved(name, where="launch")
    for name in ("ROLE_NAME", "OMP_NUM_THREADS", "MY_RANK", "NCCL_DEBUG", "PDRUN_LOG_DIR"):
        refuse_reserved(name, where="launch")
