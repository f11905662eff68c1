"""`reamp selftest`: whether this library computes on this machine what it should."""
