"""
torch.compile, and passes over its graphs.

May import: zero.settings, model, comm.
Start reading here: compile.py.
"""
