"""The module that a child process of `python -m amp run` imports as apex; the alias replaces it.

A spawned child runs the script again, and inherits only `sys.path` from its parent.
"""

from amp.compat.alias import take_the_place_of

take_the_place_of(__name__)
