"""ONNX: exporting a module, cleaning and converting the model, and models of blocks."""
