"""A network as a graph: tracing a model, what its values are, and the functions that its graph calls."""
