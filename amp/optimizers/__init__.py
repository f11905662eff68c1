"""Optimizers that do a whole step in one launch of a kernel: unscale, clip, skip, update."""

from amp.optimizers.adam import FusedAdam

__all__ = ["FusedAdam"]
