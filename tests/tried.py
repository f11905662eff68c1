"""How much the tests that try many things have tried, summed up when they end."""

from collections import Counter

TRIED: Counter[str] = Counter()
"""What this test has tried, such as `{"interrupts": 40}`."""
