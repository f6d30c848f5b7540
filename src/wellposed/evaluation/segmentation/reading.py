"""Reading pictures and masks by many threads, a batch ahead of what works on them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from torch import Tensor

from wellposed.data.masks import MaskedSet
from wellposed.data.pictures import Readings
from wellposed.errors import DataError

Order = TypeVar("Order")
Seen = TypeVar("Seen")
View = Callable[[Tensor, Tensor, Order], Seen]
"""What is made of a picture and its mask, given what else was ordered with them."""


def read_batches(
    data: MaskedSet,
    orders: Iterable[Sequence[tuple[int, Order]]],
    view: View[Order, Seen],
    readings: Readings,
) -> Iterator[list[tuple[int, Seen]]]:
    """For each batch of orders, the index and the view of every picture that could be read; others go to `readings`.

    Raises:
        DataError: at the end, if not one could be read; at once, if `readings` says so.
    """

    def attempt(index: int, order: Order) -> Seen | DataError:
        try:
            return view(*data[index], order)
        except DataError as error:
            return error

    def finished(batch: list[tuple[int, Future[Seen | DataError]]]) -> list[tuple[int, Seen]]:
        results = [(index, readings.read(partial(_result, work.result()))) for index, work in batch]
        return [(index, seen) for index, seen in results if seen is not None]

    waiting: deque[list[tuple[int, Future[Seen | DataError]]]] = deque()
    count = 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            for batch in orders:
                waiting.append([(index, pool.submit(attempt, index, order)) for index, order in batch])
                if len(waiting) > 1:
                    yield (done := finished(waiting.popleft()))
                    count += len(done)
            while waiting:
                yield (done := finished(waiting.popleft()))
                count += len(done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if not count:
        raise DataError(f"no picture of {data.name} can be read; the first: {(readings.problems or ['none'])[0]}")


def _result(seen: Seen | DataError) -> Seen:
    if isinstance(seen, DataError):
        raise seen
    return seen
