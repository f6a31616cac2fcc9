"""
Every real table gets the verdict that is stated for it, and says the same again when it is written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrun.errors import ConfigError
from pdrun.launcher.ranktables import files, write
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.model import WRITABLE_DIALECTS, RankTable

TABLES = Path(__file__).parent / "tables"
GOOD = {
    "01_v1.0_8p_serving.json": ("1.0", 1, 8),
    "03_v1.0_8p_no_device_ip.json": ("1.0", 1, 8),
    "04_v1.0_8p_hcomm_example.json": ("1.0", 1, 8),
    "05_v1.0_1p_ms_st.json": ("1.0", 1, 1),
    "07_v1.0_16p_two_servers.json": ("1.0", 2, 16),
    "12_group_v0_8p_pod.json": ("group", 1, 8),
    "13_group_v0_64p_8servers.json": ("group", 8, 64),
    "15_group_lab_16p_2servers.json": ("lab", 2, 16),
    "20_v1.2_16p_a3_superpod.json": ("1.2", 1, 16),
    "22_v2.0_2p_hcomm_example.json": ("2.0", 1, 2),
    "25_v2.0_4p_2x2.json": ("2.0", 2, 4),
}
"""File -> dialect, servers, ranks."""
REFUSED = {
    "08_v1.0_16p_docs_wildcards.json": (
        ":8: server_list[0].device[0].device_ip: '10.191.*.6' contains a *"
    ),
    "10_v1.0_8p_duplicate_device_ip.json": (
        ":8: server_list[0].device[1].device_ip: 10.200.6.8 is listed twice"
    ),
    "17_group_lab_invalid_stray_brace.json": ":33:17: there is a comma before }; remove the comma",
    "19_group_template_placeholders.json": (
        ":8:24: {instance_list} is not filled in: this is a template"
    ),
    "23_v2.0_draft_string_count.json": ":3: rank_count: must be a number in dialect 2.0, got '3'",
    "27_v2.0_topology_file_not_a_rank_table.json": (
        "edge_list: this is a topology file of the same generation, not"
    ),
    "29_not_json.txt": ":1:1: is not JSON",
    "31_v1.0_16p_merge_hccl_int_ranks.json": (
        ":11: server_list[0].device[0].rank_id: must be text, got the number 0"
    ),
    "32_v1.2_dynamicPD_8p.json": (
        "a table of vllm-ascend for prefill and decode instances, not a rank table"
    ),
}


def good(name: str) -> RankTable:
    """Return a good table."""
    return files.wait_for_table(str(TABLES / name))


def test_every_table_has_a_verdict() -> None:
    assert {path.name for path in TABLES.iterdir()} == set(GOOD) | set(REFUSED)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_table_is_taken(name: str) -> None:
    table = good(name)
    assert (table.dialect, len(table.servers), len(table.devices)) == GOOD[name]
    assert [one.rank for one in table.devices] == list(range(len(table.devices)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_table_is_refused_with_file_and_place(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        good(name)
    assert str(caught.value).startswith(name)
    assert REFUSED[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_a_table_says_the_same_when_it_is_written(name: str, tmp_path: Path) -> None:
    before = json.loads((TABLES / name).read_text())
    text = write.format_table(good(name))
    after = json.loads(text)
    if before.get("version") in ("1.0", "1.2"):
        before.setdefault("server_count", after["server_count"])  # optional, and written always
    assert after == before
    (tmp_path / "again.json").write_text(text)
    assert write.format_table(files.wait_for_table(str(tmp_path / "again.json"))) == text


@pytest.mark.parametrize("dialect", WRITABLE_DIALECTS)
@pytest.mark.parametrize("name", GOOD)
def test_what_a_conversion_gives_is_good_and_has_the_same_ranks(name: str, dialect: str) -> None:
    table = good(name)
    made, _ = write.convert_table(table, dialect)  # type: ignore[arg-type]
    again = json.loads(write.format_table(made))
    from pdrun.launcher.ranktables.read import read_table

    found, faults = read_table(again)
    assert found is not None
    assert not faults
    assert not check_table(found)
    assert found.dialect == dialect
    same = [(one.rank, one.device_id, one.ips) for one in table.devices]
    assert [(one.rank, one.device_id, one.ips) for one in found.devices] == same


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("04_v1.0_8p_hcomm_example.json", "1.2"),
        ("04_v1.0_8p_hcomm_example.json", "group"),
        ("04_v1.0_8p_hcomm_example.json", "lab"),
        ("07_v1.0_16p_two_servers.json", "lab"),
        ("12_group_v0_8p_pod.json", "1.0"),
        ("13_group_v0_64p_8servers.json", "1.2"),
    ],
)
def test_a_conversion_without_loss_comes_back_as_it_was(name: str, way: str) -> None:
    table = good(name)
    there, lost = write.convert_table(table, way)  # type: ignore[arg-type]
    assert lost == []
    back, lost = write.convert_table(there, table.dialect)
    assert lost == []
    first, again = write.table_data(table), write.table_data(back)
    for data in (first, again):
        for group in data.get("group_list", ()):
            group.pop("group_name", None)  # a label that only this dialect has
    assert again == first


@pytest.mark.parametrize(
    ("name", "dialect", "lost"),
    [
        ("20_v1.2_16p_a3_superpod.json", "1.0", "super_device_id"),
        ("20_v1.2_16p_a3_superpod.json", "1.0", "super_pod_list"),
        ("07_v1.0_16p_two_servers.json", "2.0", "server_id: dialect 2.0 has no host names"),
        ("25_v2.0_4p_2x2.json", "1.0", "level_list: layers, ports and planes"),
        ("01_v1.0_8p_serving.json", "group", "host_nic_ip"),
        ("15_group_lab_16p_2servers.json", "1.0", "board_id"),
    ],
)
def test_what_a_dialect_does_not_support_is_named(name: str, dialect: str, lost: str) -> None:
    _, found = write.convert_table(good(name), dialect)  # type: ignore[arg-type]
    assert lost in found
