"""A network's cost: multiply-adds and parameters, as sums over its layers."""
