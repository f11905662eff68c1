"""What the user asked for: levels, profiles in YAML, and the properties that they resolve to."""
