"""Learning rates over a run."""

import math


def cosine_with_warmup(step: int, *, steps: int, warmup: int) -> float:
    """The factor on the learning rate at `step` of `steps`, counted from 0: a line up from 0, then a cosine down to 0.

    Example:
        >>> [round(cosine_with_warmup(step, steps=6, warmup=2), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
