"""
One small file of facts for each way in which a cluster starts processes.

May import: hosts, common.
Start reading here: detect.py, then model.py.
"""
