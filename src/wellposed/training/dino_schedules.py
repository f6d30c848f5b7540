"""What changes from step to step of a run of DINO: learning rate, weight decay, momentum and temperature."""

import math

from wellposed.optim import cosine_with_warmup


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """From `start` at step 0 to `end` at the last of `steps`, along half a cosine.

    Example:
        >>> [round(cosine(step, 5, 0.996, 1.0), 4) for step in range(5)]
        [0.996, 0.9966, 0.998, 0.9994, 1.0]
    """
    return end - (end - start) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps - 1)))


def line(step: int, steps: float, start: float, end: float) -> float:
    """From `start` at step 0 to `end` at step `steps`, and `end` from there on.

    Example:
        >>> [round(line(step, 4, 0.04, 0.08), 3) for step in range(6)]
        [0.04, 0.05, 0.06, 0.07, 0.08, 0.08]
    """
    return end if step >= steps else start + (end - start) * step / steps


def warmed_up(step: int, steps: int, warmup: int, highest: float, last: float) -> float:
    """A learning rate: a line up to `highest` in `warmup` steps, then a cosine down to `last`."""
    factor = cosine_with_warmup(step, steps=steps, warmup=warmup)
    return highest * factor if step < warmup else last + (highest - last) * factor
