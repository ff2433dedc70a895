"""OpenVINO: engines, and the latencies of blocks from its performance counts."""
