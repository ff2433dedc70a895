"""Half an hour on an H100 or H200, in stages: see README.md in this folder."""
