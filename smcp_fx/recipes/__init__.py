"""The paper's experiments as recipes: networks, data, training and evaluation, from a file of settings each."""
