"""What happens to gradients between backward and the step, and how an optimizer steps."""
