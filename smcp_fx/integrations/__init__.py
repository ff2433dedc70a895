"""Callbacks for training frameworks; each module imports its framework, which is not a dependency."""
