"""What all layers of a session in FP8 or FP4 have in common."""


class Switch:
    """Whether the layers of a session run in FP8, or FP4.

    Attributes:
        on: whether the session is open.
        forward_is_high: whether outputs are computed in half precision.
        has_warned: whether there was a warning that a layer does not run in FP8 under a transform.
        steps: how many steps the session's optimizers have taken.
    """

    def __init__(self, forward_is_high: bool = False) -> None:
        self.on = True
        self.forward_is_high = forward_is_high
        self.has_warned = False
        self.steps = 0
