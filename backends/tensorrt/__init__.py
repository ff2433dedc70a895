"""TensorRT: engines built and timed by a worker process."""
