"""The commands' networks by name, with weights and images."""
