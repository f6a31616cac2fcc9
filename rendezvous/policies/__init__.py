"""
Decisions without a Job: restart or not, first cause, stragglers, hang report, texts.

May import: protocol. Start reading here: verdict.py.
"""
