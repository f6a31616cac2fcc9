"""
Options that depend on each other. Each resolver reads the settings and returns further ones. Pure.

`RESOLVERS` is in order: the host list gives the number of nodes, which later resolvers read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdrun.endpoint import Endpoint, port_beside_store
from pdrun.errors import UsageError
from pdrun.launcher.config.msrun_options import MSRUN_PORT
from pdrun.launcher.config.settings import (
    Priority,
    Setting,
    SettingsByPath,
    conflict_error,
    node_count,
    value_of,
)
from pdrun.launcher.config.torchrun_options import TORCHRUN_PORT
from pdrun.launcher.config.torchrun_settings import (
    check_store_port,
    resolve_local_rank_arg,
    resolve_shown_ranks,
)
from pdrun.launcher.hosts import selection
from pdrun.launcher.hosts.selection import Host

MSRUN_DEFAULT_WORKERS = 8
"""Default of both worker counts of msrun."""

DerivedSettings = tuple[Sequence[Setting], Sequence[str]]


def _resolve_hosts(settings: SettingsByPath) -> DerivedSettings:
    """
    Derive the number of nodes from the host list, after ``--include`` and ``--exclude``.

    The hosts of a detected allocation are a default: a smaller ``--nodes`` uses the first hosts.
    One node uses no list.
    """
    whole = settings.get("hosts.all")
    nodes = settings.get("resources.nodes")
    chosen = settings.get("hosts.include")
    without = settings.get("hosts.exclude")
    if chosen and without:
        raise conflict_error(without, chosen)
    choice = chosen or without
    if whole is None:
        if choice:
            raise choice.source.make_error(
                "selects hosts, but no hosts are listed", "add --hosts or --hostfile"
            )
        return (), ()
    listed: tuple[Host, ...] = whole.value
    if choice:
        listed = _filter_hosts(
            listed,
            choice,
            chosen is not None,
            value_of(settings, "resources.devices", None),
        )
    is_detected = whole.source.priority is Priority.DETECTED
    too_few = nodes is not None and nodes.value > len(listed)
    differs = nodes is not None and nodes.value != len(listed)
    if nodes is not None and (too_few or (differs and not is_detected)):
        raise nodes.source.make_error(
            f"{nodes.value} node(s), but {whole.source.label} lists {len(listed)} host(s)",
            "remove one of them",
        )
    notes = []
    if nodes is not None and nodes.value < len(listed):
        label = whole.source.label
        notes = [f"{nodes.source.describe()}: the first of the {len(listed)} hosts in {label}"]
        listed = listed[: nodes.value]
    if not listed or (len(listed) == 1 and (is_detected or notes)):
        return (), notes
    derived = [Setting("place.hosts", listed, whole.source)]
    if nodes is None:
        derived.append(Setting("resources.nodes", len(listed), whole.source))
    return derived, notes


def _filter_hosts(
    listed: tuple[Host, ...], choice: Setting, is_include: bool, devices: object
) -> tuple[Host, ...]:
    label = choice.source.label
    count = None
    if isinstance(devices, int):
        count = devices
    try:
        if is_include:
            return selection.include_hosts(listed, choice.value, label)
        return selection.exclude_hosts(listed, choice.value, label, count)
    except UsageError as error:
        raise choice.source.convert_error(error) from None


def _check_standalone(settings: SettingsByPath) -> DerivedSettings:
    """
    Refuse pdrun's own scheduler options next to ``--standalone``.

    torchrun ignores its own endpoint options in this case, and so does pdrun.
    """
    alone = settings.get("torchrun.standalone")
    ours = [
        path for path in ("scheduler.host", "scheduler.port", "place.serve") if path in settings
    ]
    for setting in (settings[path] for path in ours):
        own = setting.path == "place.serve" or setting.source.label in (
            "--scheduler",
            "PDRUN_SCHEDULER",
        )
        if alone and own and setting.source.priority <= alone.source.priority:
            raise conflict_error(alone, setting)
    return (), ()


def _resolve_store(settings: SettingsByPath) -> DerivedSettings:
    """
    Combine host and port of torch's store. Several nodes without ``--scheduler`` also get the
    scheduler's address from it: the same host, and a port computed from the store's. Beside a host
    that was detected, only the port.
    """
    host = settings.get("store.host")
    port = settings.get("store.port")
    given = host or port
    if given is None or "torchrun.standalone" in settings:
        return (), ()
    if "msrun.workers" in settings or "msrun.local_workers" in settings:
        # msrun's options of the same names are the address of its scheduler
        pairs = (("scheduler.host", host), ("scheduler.port", port))
        return [Setting(path, one.value, one.source) for path, one in pairs if one], ()
    scheduler_host = settings.get("scheduler.host")
    scheduler_port = settings.get("scheduler.port")
    _check_same_host(host, scheduler_host)
    is_local = value_of(settings, "place.local", False)
    derived: list[Setting] = []
    notes: list[str] = []
    number = port.value if port else 0
    ports = value_of(settings, "place.port_range", None)
    is_spread = node_count(settings) > 1 and not is_local
    is_detected = scheduler_host is not None and scheduler_host.source.priority is Priority.DETECTED
    if is_spread and is_detected and scheduler_port is None and port is not None:
        beside = port_beside_store(number, ports)
        derived.append(Setting("scheduler.port", beside, port.source))
    elif is_spread and scheduler_host is None:
        has_hosts = "hosts.all" in settings
        if host is not None and not (has_hosts and host.source.priority is Priority.DETECTED):
            number = port.value if port else TORCHRUN_PORT
            if port is None:
                notes = [f"{host.source.describe()} has no port: {number} is used, as by torchrun"]
            derived.append(Setting("scheduler.host", host.value, host.source))
            if scheduler_port is None:
                beside = port_beside_store(number, ports)
                derived.append(Setting("scheduler.port", beside, (port or host).source))
        elif not has_hosts and given.source.priority is not Priority.DETECTED:
            raise given.source.make_error(
                "needs a host", "add --master-addr with the address of the first node"
            )
    elif port is not None and scheduler_port is not None and port.value == scheduler_port.value:
        used_by = scheduler_port.source.describe()
        return (), [
            f"{port.source.describe()} is the scheduler's port ({used_by}): torch's store"
            " gets another one"
        ]
    name = host.value if host else ""
    return [*derived, Setting("place.store", Endpoint(name, number), given.source)], notes


def _check_same_host(store: Setting | None, scheduler: Setting | None) -> None:
    """Refuse two hosts that the user has set in the same way: both are node 0."""
    if store is None or scheduler is None or store.value == scheduler.value:
        return
    if store.source.priority == scheduler.source.priority != Priority.DETECTED:
        raise conflict_error(store, scheduler)


def _resolve_scheduler(settings: SettingsByPath) -> DerivedSettings:
    """Combine host and port. Without a port, use the default port of the option's launcher."""
    host = settings.get("scheduler.host")
    port = settings.get("scheduler.port")
    if alone := settings.get("torchrun.standalone"):
        stores = (settings.get("store.host"), settings.get("store.port"))
        unused = dict.fromkeys(
            setting.source.describe() for setting in (host, port, *stores) if setting
        )
        reason = f"is not used: {alone.source.describe()} runs one node"
        return (), [f"{label} {reason}" for label in unused]
    if host is None and port is None:
        return (), ()
    if host is None:
        assert port is not None
        if node_count(settings) > 1 and not value_of(settings, "place.local", False):
            raise port.source.make_error(
                "needs a host", "add --master-addr with the address of the first node"
            )
        return (), [f"{port.source.describe()} is not used: nothing listens on a fixed port"]
    if port is not None:
        return [Setting("place.scheduler", Endpoint(host.value, port.value), host.source)], ()
    number = TORCHRUN_PORT
    if "msrun.workers" in settings or "msrun.local_workers" in settings:
        number = MSRUN_PORT
    note = f"{host.source.describe()} has no port: {number} is used, the default of its launcher"
    return [Setting("place.scheduler", Endpoint(host.value, number), host.source)], [note]


def _resolve_msrun_counts(settings: SettingsByPath) -> DerivedSettings:
    """
    Compute nodes and workers per node from msrun's ``--worker_num`` (all workers) and
    ``--local_worker_num`` (workers per node).
    """
    whole = settings.get("msrun.workers")
    local = settings.get("msrun.local_workers")
    if whole is None and local is None:
        return (), ()
    source = settings["msrun.workers" if whole else "msrun.local_workers"].source
    notes = []
    if whole is None or local is None:
        notes = [f"the other worker count is {MSRUN_DEFAULT_WORKERS}, msrun's default"]
    total = value_of(settings, "msrun.workers", MSRUN_DEFAULT_WORKERS)
    per_node = value_of(settings, "msrun.local_workers", MSRUN_DEFAULT_WORKERS)
    if local is None:
        devices = value_of(settings, "resources.devices", "auto")
        nodes = value_of(settings, "resources.nodes", None)
        if devices != "auto":
            per_node = devices
        elif nodes is not None and total % nodes == 0:
            per_node = total // nodes
    if not isinstance(per_node, int) or total % per_node:
        raise source.make_error(
            f"{total} workers cannot be divided into nodes of {per_node}",
            "set --worker_num to a multiple of --local_worker_num",
        )
    derived = [
        Setting("resources.nodes", total // per_node, source),
        Setting("resources.min_nodes", 0, source),
        Setting("resources.devices", per_node, local.source if local else source),
    ]
    return derived, notes


def _resolve_elastic(settings: SettingsByPath) -> DerivedSettings:
    """
    Apply torchrun's settings of elastic jobs: the delay of ``--nnodes MIN:MAX`` before a late node
    joins, and last_call_timeout.
    """
    if not value_of(settings, "resources.min_nodes", 0):
        return (), ()
    pairs = (("torchrun.grow", "policy.grow"), ("torchrun.gather", "policy.gather"))
    derived = []
    for alias_path, path in pairs:
        if alias_path in settings and path not in settings:
            alias = settings[alias_path]
            derived.append(Setting(path, alias.value, alias.source))
    return derived, ()


def _resolve_binding(settings: SettingsByPath) -> DerivedSettings:
    """Combine --bind_core and --bind_numa: False counts only if the other option is not True."""
    pairs = (("msrun.bind_core", "cores"), ("msrun.bind_numa", "numa"))
    given = [(settings[path], mode) for path, mode in pairs if path in settings]
    enabled = [
        Setting("resources.bind", mode, setting.source) for setting, mode in given if setting.value
    ]
    disabled = [Setting("resources.bind", "none", setting.source) for setting, _ in given[:1]]
    return enabled or disabled, ()


RESOLVERS: tuple[Callable[[SettingsByPath], DerivedSettings], ...] = (
    _resolve_hosts,
    _resolve_msrun_counts,
    _resolve_elastic,
    _check_standalone,
    _resolve_store,
    _resolve_scheduler,
    _resolve_binding,
    resolve_shown_ranks,
    resolve_local_rank_arg,
    check_store_port,
)
