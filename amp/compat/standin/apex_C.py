"""What a child of `python -m amp run` imports as apex_C; see apex beside it."""

import importlib

from amp.compat import install

install(replace=True)
importlib.import_module("apex_C")
