"""Where in a loss scaler's state, one float32 tensor `[STATE_SIZE]` on the device, each number is.

Counts are whole numbers, exact up to 2**24.
"""

SCALE = 0
INVERSE = 1
GOOD_STEPS = 2
"""Since the scale last moved."""
HYSTERESIS = 3
"""Overflows left until the scale goes down."""
FOUND_INF = 4
"""1 after an overflow, else 0."""
OVERFLOWS = 5
"""In a row."""
STATE_SIZE = 6
