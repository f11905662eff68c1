"""Running a step again, in other precisions, to see what helps."""
