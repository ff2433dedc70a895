"""Measured latency: tables of block latencies, how they are filled and read, and the cost that they give."""
