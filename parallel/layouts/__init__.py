"""
How tensors lie over the devices of a mesh, and the way from one layout to another. Integers only,
no torch.

May import: nothing.
Start reading here: layout.py.
"""
