"""The k values nearest to many numbers in the least squares, which in one dimension can be found for certain.

Sorted, the numbers of a cluster stand next to each other, and with running sums of x and x^2 the cost of any run of
them is known at once. Dynamic programming over the places where runs may end then finds the best k runs (Wang and Song
2011): for certain, for up to 32 clusters, where a row has at most 512 different numbers. Else the programming works on
so many places, for more than eight clusters in two steps: large runs first, then smaller ones within each. Lloyd's
iteration on all numbers goes on from there until no number changes its cluster. Nothing is random.

Shapes: T rows, n numbers in each, k clusters, P places, C large runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_PLACES, _PLACES_WITHIN = 512, 128
_MOST_EXACT = 32
_CLUSTERS_WITHIN = 8
"""In a large run, on average; at most four times as many."""
_STEPS, _WIDTHS = 8, (0.9, 0.3, 0.1)
"""To each side by which edges are moved in the end, and how far in parts of the runs beside them."""
_ROUNDS = 4096
_CHECKED_EVERY = 8
_COSTS = {"cpu": 2**20, "cuda": 2**24}
"""Costs of runs that are held at a time, each a number of 8 bytes."""


def kmeans_codebooks(rows_Tn: Tensor, k: int) -> Tensor:
    """The k centroids of each row, (T, k), ascending, in float64; where a row has fewer numbers, the last repeats.

    Example:
        >>> kmeans_codebooks(torch.tensor([[0.0, 9.0, 1.0, 10.0, 11.0]]), 2)
        tensor([[ 0.5000, 10.0000]], dtype=torch.float64)
    """
    sorted_Tn = rows_Tn.sort(dim=1).values.double()
    shift = sorted_Tn.mean(1, keepdim=True)
    scale = (sorted_Tn - shift).abs().amax(1, keepdim=True)
    scale = scale.where(scale > 0, 1.0)
    sorted_Tn = (sorted_Tn - shift) / scale  # running sums then lose no digits to a large mean
    sums = _Sums(pad(sorted_Tn.cumsum(1), (1, 0)), pad(sorted_Tn.square().cumsum(1), (1, 0)))
    different_TP, is_exact = _different(sorted_Tn, _PLACES if k <= _MOST_EXACT else k)
    large = k if k <= _CLUSTERS_WITHIN else k // _CLUSTERS_WITHIN
    edges = torch.empty(len(sorted_Tn), k + 1, dtype=torch.long, device=rows_Tn.device)
    if is_exact.any():
        edges[is_exact] = _best_runs(sums.of(is_exact), different_TP[is_exact], k)
    if not is_exact.all():
        some, of_some = sorted_Tn[~is_exact], sums.of(~is_exact)
        whole = torch.tensor([0, some.shape[1]], device=some.device).expand(len(some), 1, 2)
        runs = _best_runs(of_some, _spread_places(some, whole[..., 0], whole[..., 1], _PLACES)[:, 0], large)
        edges[~is_exact] = runs if large == k else _best_runs_within(some, of_some, runs, k)
    centroids = _lloyd(sorted_Tn, sums, sums.means(edges))
    for width in _WIDTHS:
        centroids = sums.means(_moved(sums, _edges_between(sorted_Tn, centroids), width), otherwise=centroids)
    return (_lloyd(sorted_Tn, sums, centroids) * scale + shift).sort(dim=1).values


class _Sums(NamedTuple):
    """Running sums of sorted numbers and of their squares, (T, n + 1) each."""

    first: Tensor
    second: Tensor

    def of(self, rows: Tensor) -> "_Sums":
        return _Sums(self.first[rows], self.second[rows])

    def at(self, places: Tensor) -> "_Sums":
        """(T, ...) of places (T, ...)."""
        flat = places.flatten(1)
        return _Sums(*(sums.gather(1, flat).view_as(places) for sums in self))

    def means(self, edges: Tensor, otherwise: Tensor | None = None) -> Tensor:
        """Of the runs between edges (T, k + 1); where one is empty, `otherwise` or the mean before it."""
        count, total = edges.diff(dim=1), self.first.gather(1, edges).diff(dim=1)
        if otherwise is not None:
            return torch.where(count > 0, total / count.clamp_min(1), otherwise)
        means = torch.where(count > 0, total / count.clamp_min(1), -torch.inf).cummax(dim=1).values
        return torch.where(means.isinf(), means.masked_fill(means.isinf(), torch.inf).amin(1, keepdim=True), means)


def _different(sorted_Tn: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Where another number begins, filled up with n, and which rows have at most `limit` of these."""
    n = sorted_Tn.shape[1]
    new = pad(sorted_Tn[:, 1:] > sorted_Tn[:, :-1], (1, 0), value=True)
    order = new.long().cumsum(1) - 1
    is_exact = order[:, -1] < limit
    most = int(order[is_exact, -1].max()) + 1 if is_exact.any() else 0
    places = torch.full((len(sorted_Tn), most + 1), n, device=sorted_Tn.device)
    rows, columns = (new & is_exact[:, None]).nonzero(as_tuple=True)
    places[rows, order[rows, columns]] = columns
    return places, is_exact


def _spread_places(sorted_Tn: Tensor, starts: Tensor, ends: Tensor, count: int) -> Tensor:
    """Of each run, (T, C), `count` places and its end, (T, C, count + 1): half equal in numbers, half in distance."""
    half = count // 2
    part = torch.linspace(0, 1, half + 1, dtype=torch.float64, device=sorted_Tn.device)[:-1]
    by_number = starts[..., None] + ((ends - starts)[..., None] * part).long()
    low, high = (sorted_Tn.gather(1, at.clamp(0, sorted_Tn.shape[1] - 1))[..., None] for at in (starts, ends - 1))
    values = torch.cat(
        [sorted_Tn.gather(1, _within(by_number, sorted_Tn)).view_as(by_number), low + (high - low) * part], 2
    )
    found = torch.searchsorted(sorted_Tn, values.flatten(1)).view_as(values)
    found = torch.maximum(torch.minimum(found, ends[..., None]), starts[..., None])
    return torch.cat([starts[..., None], found, ends[..., None]], 2).sort(dim=2).values[..., 1:]


def _within(places: Tensor, sorted_Tn: Tensor) -> Tensor:
    return places.flatten(1).clamp_max(sorted_Tn.shape[1] - 1)


def _best_runs(sums: _Sums, places_TP: Tensor, k: int) -> Tensor:
    """The edges, (T, k + 1), of the k runs between `places` that cost least."""
    if places_TP.shape[1] <= k + 1:
        return pad(places_TP, (0, k + 1 - places_TP.shape[1]), value=int(places_TP[0, -1]))
    return _edges(places_TP, _program(sums.at(places_TP), places_TP, k)[1], k)


def _best_runs_within(sorted_Tn: Tensor, sums: _Sums, runs: Tensor, k: int) -> Tensor:
    """The edges, (T, k + 1), of k runs within large ones, (T, C + 1), which get as many as lowers the cost most."""
    t, large = len(runs), runs.shape[1] - 1
    most = min(k, 4 * _CLUSTERS_WITHIN)
    places = _spread_places(sorted_Tn, runs[:, :-1], runs[:, 1:], _PLACES_WITHIN)
    at = _Sums(*(each.flatten(0, 1) for each in sums.at(places)))
    places = places.flatten(0, 1)
    costs, origins = _program(at, places, most)
    costs = costs.view(t, large, most)
    gains = (costs[..., :-1] - costs[..., 1:]).cummin(dim=2).values.flatten(1)
    chosen = gains.argsort(dim=1, descending=True, stable=True)[:, : k - large]
    counts = torch.ones(t, large, dtype=torch.long, device=runs.device)
    counts.scatter_add_(1, chosen.div(most - 1, rounding_mode="floor"), torch.ones_like(chosen))
    ends = _edges(places, origins, counts.flatten())[:, 1:].reshape(t, -1)
    unused = torch.arange(most, device=runs.device) < most - counts[..., None]
    ends = ends.masked_fill(unused.flatten(1), -1).sort(dim=1).values[:, -k:]
    return pad(ends, (1, 0))


def _program(at: _Sums, places_TP: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The least cost of 1 to k runs, (T, k), and where the last of 2 to k runs up to a place begins, (k - 1, T, P)."""
    together = max(1, _COSTS.get(places_TP.device.type, 2**20) // places_TP.shape[1] ** 2)
    costs = places_TP.new_empty(len(places_TP), k, dtype=torch.float64)
    origins = places_TP.new_empty(k - 1, *places_TP.shape)
    for rows in (slice(start, start + together) for start in range(0, len(places_TP), together)):
        cost = _costs(at.first[rows], at.second[rows], places_TP[rows])
        best, sums = cost[:, :, 0], torch.empty_like(cost)
        costs[rows, 0] = best[:, -1]
        for i in range(k - 1):
            best, origins[i, rows] = torch.add(best[:, None, :], cost, out=sums).min(dim=2)
            costs[rows, i + 1] = best[:, -1]
    return costs, origins


def _costs(first: Tensor, second: Tensor, places_TP: Tensor) -> Tensor:
    """Of the runs that end at the place of a row and begin at that of a column, (T, P, P)."""
    count = places_TP[:, :, None] - places_TP[:, None, :]
    total = first[:, :, None] - first[:, None, :]
    cost = second[:, :, None] - second[:, None, :] - total.square() / count.clamp_min(1)
    return torch.where(count >= 0, cost.clamp_min(0), torch.inf)


def _edges(places_TP: Tensor, origins: Tensor, counts: Tensor | int) -> Tensor:
    """The edges, (T, k + 1), of the best `counts` runs; where those are fewer than k, empty ones come first."""
    rows = torch.arange(len(places_TP), device=places_TP.device)
    layer = torch.as_tensor(counts, device=places_TP.device).expand(len(places_TP)) - 2
    place = torch.full_like(rows, places_TP.shape[1] - 1)
    edges = [place]
    for step in range(len(origins)):
        place = torch.where(layer >= step, origins[(layer - step).clamp_min(0), rows, place], 0)
        edges.append(place)
    edges.append(torch.zeros_like(place))
    return places_TP.gather(1, torch.stack(edges[::-1], 1))


def _moved(sums: _Sums, edges: Tensor, width: float) -> Tensor:
    """The best of all ways to move every edge by up to `width` of the runs beside it, all at once."""
    t, k = len(edges), edges.shape[1] - 1
    steps = torch.linspace(-width, width, 2 * _STEPS + 1, dtype=torch.float64, device=edges.device)
    size = pad(edges.diff(dim=1), (1, 1))  # nothing beyond the first edge and the last: these stay
    reach = torch.where(steps < 0, size[:, :-1, None], size[:, 1:, None])
    reach[:, [0, -1]] = 0
    places = edges[..., None] + (reach * steps).round().long()
    at = sums.at(places)
    count = places[:, 1:, :, None] - places[:, :-1, None, :]
    total = at.first[:, 1:, :, None] - at.first[:, :-1, None, :]
    cost = at.second[:, 1:, :, None] - at.second[:, :-1, None, :] - total.square() / count.clamp_min(1)
    cost = torch.where(count >= 0, cost.clamp_min(0), torch.inf)
    best, origins = cost.new_zeros(t, len(steps)), []
    for i in range(k):
        best, origin = (best[:, None, :] + cost[:, i]).min(dim=2)
        origins.append(origin)
    chosen = [best.argmin(1, keepdim=True)]
    for origin in reversed(origins):
        chosen.append(origin.gather(1, chosen[-1]))
    return places.gather(2, torch.stack(chosen[::-1], 1))[..., 0]


def _edges_between(sorted_Tn: Tensor, centroids: Tensor) -> Tensor:
    """Edges (T, k + 1) of the runs that are nearest to each centroid."""
    cuts = torch.searchsorted(sorted_Tn, (centroids[:, 1:] + centroids[:, :-1]) / 2)
    return torch.cat([torch.zeros_like(cuts[:, :1]), cuts, torch.full_like(cuts[:, :1], sorted_Tn.shape[1])], 1)


def _lloyd(sorted_Tn: Tensor, sums: _Sums, centroids: Tensor) -> Tensor:
    """Every number to its nearest centroid, every centroid to its mean, until nothing changes."""
    for step in range(_ROUNDS):
        moved = sums.means(_edges_between(sorted_Tn, centroids), otherwise=centroids)
        if step % _CHECKED_EVERY == 0 and torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids
