"""
Layouts of tensors over the devices of a mesh, and redistribution between them. Integers only.

May import: nothing.
Start reading here: layout.py.
"""
