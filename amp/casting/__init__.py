"""How a session gives models their precision: op by op, or by casting the model."""
