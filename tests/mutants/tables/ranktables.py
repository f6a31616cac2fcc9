"""Rank tables: what HCCL would refuse later, in each worker."""

from __future__ import annotations

from tests.mutants.model import Mutant

RANKTABLES = "launcher/ranktables/"
CHANGES = "tests/launcher/ranktables/test_changes.py::test_"
FILES = "tests/launcher/ranktables/test_files.py::test_"
MAKE = "tests/launcher/ranktables/test_make.py::test_"
RULES = "tests/launcher/ranktables/test_rules.py::test_"
VERDICTS = "tests/launcher/ranktables/test_verdicts.py::test_"


MUTANTS = (
    Mutant(
        "a rank is listed twice",
        f"{RANKTABLES}check.py",
        '    faults = _find_duplicates(ranks, "a rank")',
        '    faults = _find_duplicates([], "a rank")',
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "a rank is missing",
        f"{RANKTABLES}check.py",
        "        if rank != expected:",
        "        if False:",
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "ranks of a server are not consecutive",
        f"{RANKTABLES}check.py",
        "if own and own != list(range(next_rank, next_rank + len(own))):",
        "if False:",
        f"{RULES}ranks_of_a_server_are_consecutive",
    ),
    Mutant(
        "an address is listed twice",
        f"{RANKTABLES}check.py",
        "for device in table.devices for ip in device.ips),",
        "for device in table.devices for ip in device.ips[:0]),",
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "several servers have no addresses",
        f"{RANKTABLES}check.py",
        'if lacking and not server.first_text("host_ip"):',
        "if False:",
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "a server is in no super pod",
        f"{RANKTABLES}check.py",
        ("        for name in sorted({server.id for server in table.servers} ^ set(listed))[:1]:"),
        "        for name in ():",
        f"{RULES}super_pods_are_complete",
    ),
    Mutant(
        "a super pod is torn apart",
        f"{RANKTABLES}check.py",
        "        if name in finished:\n            return False",
        "        if False:\n            return False",
        f"{CHANGES}servers_of_a_super_pod_are_consecutive",
    ),
    Mutant(
        "numbers of any length are parsed",
        f"{RANKTABLES}jsontext.py",
        "    if len(text) > MAX_DIGITS:",
        "    if False:",
        f"{RULES}hostile_json_is_refused_in_one_line",
    ),
    Mutant(
        "a broken character of a table is taken",
        f"{RANKTABLES}jsontext.py",
        'any("\\ud800" <= char <= "\\udfff" for char in text)',
        "False",
        f"{RULES}hostile_json_is_refused_in_one_line",
    ),
    Mutant(
        "a device beyond a server's",
        f"{RANKTABLES}values.py",
        "        if int(value) > maximum:",
        "        if False:",
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "a number with zeros in front",
        f"{RANKTABLES}values.py",
        'r"0|[1-9][0-9]{0,8}"',
        'r"[0-9]{1,9}"',
        f"{RULES}a_fault_is_named_with_its_path",
    ),
    Mutant(
        "a placeholder is a value",
        f"{RANKTABLES}values.py",
        '        if "*" in value:\n',
        "        if False:\n",
        f"{VERDICTS}a_bad_table_is_refused_with_file_and_place",
    ),
    Mutant(
        "a file that changes is read half",
        f"{RANKTABLES}files.py",
        "        if before == _file_identity(path):",
        "        if True:",
        f"{CHANGES}a_file_that_is_replaced_while_it_is_read_is_read_again",
    ),
    Mutant(
        "a table in the making is not waited for",
        f"{RANKTABLES}files.py",
        ('            if loaded.table is None or loaded.table.status != "initializing":'),
        "            if True:",
        f"{FILES}a_table_in_the_making_is_waited_for",
    ),
    Mutant(
        "a table that never completes is waited for",
        f"{RANKTABLES}files.py",
        "        if clock() >= deadline:\n            raise",
        "        if False:\n            raise",
        f"{FILES}one_that_never_completes_is_a_deadline",
    ),
    Mutant(
        "a file is half written",
        f"{RANKTABLES}files.py",
        "        temporary.replace(target)",
        "        target.write_text(text)",
        f"{FILES}writing_is_whole_or_not_at_all",
    ),
    Mutant(
        "a table that everybody can write is no warning",
        f"{RANKTABLES}files.py",
        "if not mode & stat.S_IWOTH:",
        "if True:",
        f"{RULES}a_table_that_others_may_write_is_a_warning",
    ),
    Mutant(
        "two devices of a host have one address",
        f"{RANKTABLES}make.py",
        "        if device in addresses:\n            raise",
        "        if False:\n            raise",
        f"{MAKE}invalid_addresses_are_refused",
    ),
    Mutant(
        "merged tables share a server",
        f"{RANKTABLES}make.py",
        "            if server.id in servers:",
        "            if False:",
        f"{MAKE}merging_refuses_duplicates_and_other_dialects",
    ),
    Mutant(
        "merged ranks are not renumbered",
        f"{RANKTABLES}make.py",
        "replace(device, rank=rank + index) for",
        "device for",
        f"{MAKE}merging_renumbers_ranks_and_keeps_everything",
    ),
    Mutant(
        "an entry is lost without a word",
        f"{RANKTABLES}write.py",
        '        lost.append("super_device_id")',
        "        pass",
        f"{VERDICTS}what_a_dialect_does_not_support_is_named",
    ),
)
