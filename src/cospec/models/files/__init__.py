"""Files of weights: GGUF, quantized safetensors, and sources of tensors."""
