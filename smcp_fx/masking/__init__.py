"""The functions that graphs with masks call."""
