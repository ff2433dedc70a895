"""Networks trained to their end, to prune: two data sets, three networks, and their training."""
