"""The dynamic cluster: a pure membership state machine, and ZeroMQ to carry its messages."""
