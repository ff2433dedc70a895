"""ONNX Runtime: engines, and the latencies of blocks from its profiler."""
