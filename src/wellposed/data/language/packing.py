"""Several short sequences in one row, so that few of its places are padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which sequences share a row of `room` tokens: the longest first, each where least is left over (best fit).

    Rows, and the sequences in a row, are in the order of the first one's number.

    Example:
        >>> packed([5, 3, 4, 2, 1], room=8)
        [[0, 1], [2, 3, 4]]
    """
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = bisect_left(left, (lengths[number], 0))
        if place == len(left):
            rows.append([])
            free, row = room, len(rows) - 1
        else:
            free, row = left.pop(place)
        rows[row].append(number)
        insort(left, (free - lengths[number], row))
    return sorted(sorted(row) for row in rows)
