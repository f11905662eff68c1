"""What the commands of `python -m amp` share: how they are declared, and what they write."""
