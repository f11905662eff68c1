"""FP32 master weights, which an optimizer updates instead of the model's 16-bit parameters."""
