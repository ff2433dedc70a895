"""The parts of a network that a runtime runs as one: cutting them out, and which of them cost the same."""
