"""Timing: samples and their spread, the core's pace, caches that fade, and whether the machine is quiet."""
