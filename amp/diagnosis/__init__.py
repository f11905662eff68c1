"""What went wrong in a step, where and why: every op of it is looked at."""
