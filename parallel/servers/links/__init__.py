"""
A worker's links to the tables: in this process, or over a connection to one server.

Beside them is what each request of a client uses: which server has what, checks, and the cache of
rows. May import: tables, and the channel, frames and descriptions of tables in servers.
Start reading here: link.py, then remote.py.
"""
