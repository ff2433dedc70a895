"""Networks by name, with weights and images for them: what the commands take."""
