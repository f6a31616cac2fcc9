"""
`pdrun.init()`: rank, device and process group of a worker.

May import: torch_compat; rendezvous.clients; launcher.adapters (the one door to the other half).
Start reading here: init.py.
"""
