"""Files that are complete or absent: text, tensors, values as JSON, random states, versions."""
