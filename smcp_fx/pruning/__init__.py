"""Pruning while a model trains: importances, the choice of masks, schedule state, and mistakes in the loop."""
