"""Loss scaling, gradients between backward and the step, and how an optimizer steps."""
