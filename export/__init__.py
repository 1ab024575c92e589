"""HF checkpoint to canonical ONNX: the graph is built from a ModelSpec and the weights are streamed."""
