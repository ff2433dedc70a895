"""Converted models as data: tensors, and a manifest that names only entries of closed lists."""
