"""Run a stage program on ONNX Runtime: its operators as ONNX nodes, its weights as initializers."""
