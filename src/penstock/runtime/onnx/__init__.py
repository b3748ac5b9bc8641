"""Run a stage program on ONNX Runtime: operators become ONNX nodes, weights become initializers."""
