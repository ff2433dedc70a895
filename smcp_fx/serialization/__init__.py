"""Converted models as data: tensors and a manifest, from closed lists of what a file may name."""
