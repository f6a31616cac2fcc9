"""
Reports on a run: explain, memory, traffic, verify.

May import: checkpoint, training, zero, model, data, comm.
Start reading here: explain.py.
"""
