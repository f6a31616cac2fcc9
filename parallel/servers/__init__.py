"""
Parameter servers: tables of weights in processes of their own, which workers pull and push.

    worker: client.py -> links -> channel.py  ====  channel.py -> session.py -> store.py: server

The server's program is main.py; the launcher starts it (`pdrun --servers N`). Without servers a
worker has the same tables in its own memory. `served_model.py` connects them with `parallelize`.
`tables/clocks.py`, `sharding.py` and `frames.py` are pure.

May import: checkpoint (files), startup, rng and what is below them.
Start reading here: client.py for workers, tables/store.py for servers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdrun.parallel.servers.client import ServerClient as ServerClient
    from pdrun.parallel.servers.client import connect as connect
    from pdrun.parallel.servers.settings import Servers as Servers
    from pdrun.parallel.servers.settings import dense as dense
    from pdrun.parallel.servers.settings import rows as rows

__all__ = ["ServerClient", "Servers", "connect", "dense", "rows"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: most programs have no servers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client" if name in ("ServerClient", "connect") else "settings"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
