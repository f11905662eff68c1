"""What a child of `python -m amp run` imports as apex: it installs the alias, which takes its place.

A child that is spawned runs the script again, with its parent's `sys.path` and nothing else of it.
"""

from amp.compat.alias import take_the_place_of

take_the_place_of(__name__)
