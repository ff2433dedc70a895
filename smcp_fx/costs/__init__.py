"""What a network costs: multiply-adds and parameters, as sums over its layers."""
