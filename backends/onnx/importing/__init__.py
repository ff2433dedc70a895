"""ONNX files as plain PyTorch networks: read, rebuilt of torch.nn modules, and compared in ONNX Runtime."""
