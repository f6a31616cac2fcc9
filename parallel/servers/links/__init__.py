"""
A worker's links to the tables: in this process, or over a connection to one server.

May import: tables, and the channel, frames and descriptions of tables in servers.
Start reading here: link.py, then remote.py.
"""
