"""FP32 master weights, which an optimizer updates in place of the model's 16-bit parameters."""
