"""
What a run says of itself: explain, memory, traffic, verify.

May import: checkpoint, training.state, zero, model, data, comm.
Start reading here: explain.py.
"""
