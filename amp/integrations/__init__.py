"""Other people's training loops: a module for each, imported by name, so that none is a dependency."""
