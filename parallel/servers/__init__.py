"""
Parameter servers: tables of weights in processes of their own, which workers pull and push.

    worker: client.py -> links.py -> channel.py  ====  channel.py -> service.py -> store.py: server

The server's program is main.py; the launcher starts it (`pdrun --servers N`). Without servers a
worker has the same tables in its own memory. `clocks.py`, `sharding.py` and `frames.py` are pure.

May import: checkpoint (files), startup, rng and what is below them.
Start reading here: client.py for workers, store.py for servers.
"""

from pdrun.parallel.servers.client import ServerClient, connect
from pdrun.parallel.servers.settings import Servers, dense, rows

__all__ = ["ServerClient", "Servers", "connect", "dense", "rows"]
