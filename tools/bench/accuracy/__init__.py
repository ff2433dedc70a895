"""Accuracy at a share of the FLOPs, by training budget: trained networks, pruned in every way and trained on."""
