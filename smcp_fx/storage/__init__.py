"""Files that are whole or absent: writing, tensors with a checksum, values as JSON, random states, versions."""
