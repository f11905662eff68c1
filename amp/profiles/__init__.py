"""Levels, profiles in YAML, and the properties that they resolve to."""
