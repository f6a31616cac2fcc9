"""Pipeline parallel: a model cut into stages, and the order in which these work."""
