"""The paper's experiments as recipes: one file of settings gives network, data, training and evaluation."""
