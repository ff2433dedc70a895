"""Networks with public weights, pruned without training: what is kept, beside rivals."""
