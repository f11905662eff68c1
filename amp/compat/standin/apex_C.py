"""The module that a child process of `python -m amp run` imports as apex_C; see `apex`."""

from amp.compat.alias import take_the_place_of

take_the_place_of(__name__)
