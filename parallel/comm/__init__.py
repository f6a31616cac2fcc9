"""
Mesh, process groups, collectives, watchdog.

May import: startup, layouts, torch_compat.
Start reading here: mesh.py, then communicator.py.
"""
