"""Data: job files and other texts to start from; imported by nobody."""
