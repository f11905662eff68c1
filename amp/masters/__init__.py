"""FP32 master weights: what stands in an optimizer for a 16-bit parameter of the model."""
