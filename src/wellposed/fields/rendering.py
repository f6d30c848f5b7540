"""Volume rendering: what a ray sees of densities and colours along it, and where along it to look (arXiv 2003.08934).

    C = sum_i T_i (1 - exp(-sigma_i delta_i)) c_i + T_end background,   T_i = exp(-sum_{j<i} sigma_j delta_j)

Shapes: R rays, M places along each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.fields.rays import Rays

Field = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From places (S, 3) and directions (S, 3) to density (S,) and colour (S, 3)."""
ENDLESS = 1e10
"""Length of the last piece of a ray that has no background: what it meets there hides everything."""


class Seen(NamedTuple):
    """Colour (R, 3) and the weights (R, M) with which the places make it."""

    colour: Tensor
    weights: Tensor


def composite(density_RM: Tensor, colour_RM3: Tensor, length_RM: Tensor, background: float | None) -> Seen:
    """The rendering equation above; with None for the background, what is left sees nothing and is black.

    In float32, whatever autocast says.

    Example:
        >>> half = torch.full((1, 1), 0.5).log().neg()  # a density that lets half of the light through
        >>> composite(half, torch.zeros(1, 1, 3), torch.ones(1, 1), background=1.0).colour
        tensor([[0.5000, 0.5000, 0.5000]])
    """
    depth_RM = density_RM.float() * length_RM
    weights_RM = torch.exp(-sum_before(depth_RM)) * -torch.expm1(-depth_RM)
    colour_R3 = (weights_RM[..., None] * colour_RM3).sum(1)
    if background is not None:
        colour_R3 = colour_R3 + background * (1 - weights_RM.sum(1, keepdim=True))
    return Seen(colour_R3, weights_RM)


def sum_before(values_RM: Tensor) -> Tensor:
    """For each entry of a row the sum of those before it, in float32.

    As a product with a triangle of ones, of which torch has a repeatable kernel on a GPU, as it has none of cumsum.
    """
    count = values_RM.shape[1]
    with torch.autocast(values_RM.device.type, enabled=False):
        triangle = torch.ones(count, count, device=values_RM.device).triu(1)
        return values_RM.float() @ triangle


def stratified(start_R: Tensor, end_R: Tensor, count: int, *, jitter: bool) -> Tensor:
    """(R, `count`) places: one in each of as many equal pieces, at random if `jitter` and in its middle if not."""
    middle = torch.full((len(start_R), count), 0.5, device=start_R.device)
    within = torch.rand_like(middle) if jitter else middle
    share_RM = (torch.arange(count, device=start_R.device) + within) / count
    return start_R[:, None] + (end_R - start_R)[:, None] * share_RM


def importance(edges_RE: Tensor, weights_RM: Tensor, count: int, *, jitter: bool) -> Tensor:
    """(R, `count`) places drawn with constant density between two edges, in proportion to the weights there.

    Args:
        edges_RE: M + 1 places in order.
        weights_RM: at least 0.
        count: how many.
        jitter: draw at random in equal pieces of the probability, instead of in their middles.
    """
    weights_RM = weights_RM + 1e-5
    share_RM = weights_RM / weights_RM.sum(1, keepdim=True)
    before_RE = torch.cat([sum_before(share_RM), torch.ones_like(share_RM[:, :1])], 1)
    wanted = stratified(torch.zeros_like(share_RM[:, 0]), torch.ones_like(share_RM[:, 0]), count, jitter=jitter)
    piece = (torch.searchsorted(before_RE, wanted, right=True) - 1).clamp(0, share_RM.shape[1] - 1)
    low, high = edges_RE.gather(1, piece), edges_RE.gather(1, piece + 1)
    return low + (high - low) * ((wanted - before_RE.gather(1, piece)) / share_RM.gather(1, piece)).clamp(0, 1)


def render_places(field: Field, rays: Rays, t_RM: Tensor, end_R: Tensor, background: float | None) -> Seen:
    """What rays see of `field`, asked at `t_RM`; each place stands for the way to the next."""
    length_RM = torch.diff(t_RM, dim=1, append=end_R[:, None])
    if background is None:
        length_RM = torch.cat([length_RM[:, :-1], torch.full_like(length_RM[:, :1], ENDLESS)], 1)
    points = rays.origins[:, None] + t_RM[..., None] * rays.directions[:, None]
    views = rays.views[:, None].expand_as(points)
    density, colour = field(points.reshape(-1, 3), views.reshape(-1, 3))
    length_RM = length_RM * rays.directions.norm(dim=1, keepdim=True)
    return composite(density.view_as(t_RM), colour.view_as(points), length_RM, background)


def render_hierarchical(
    coarse: Field,
    fine: Field,
    rays: Rays,
    near: float,
    far: float,
    counts: tuple[int, int],
    background: float | None,
    *,
    jitter: bool,
) -> tuple[Tensor, Tensor]:
    """Colours (R, 3) by the coarse field, at `counts[0]` places, and by the fine one, at `counts[1]` more.

    The latter are drawn where the coarse field has its weight.
    """
    start_R, end_R = (torch.full_like(rays.origins[:, 0], t) for t in (near, far))
    t_RM = stratified(start_R, end_R, counts[0], jitter=jitter)
    seen = render_places(coarse, rays, t_RM, end_R, background)
    with torch.no_grad():
        middles = (t_RM[:, 1:] + t_RM[:, :-1]) / 2
        more = importance(middles, seen.weights[:, 1:-1], counts[1], jitter=jitter)
        t_RM = torch.cat([t_RM, more], 1).sort(dim=1).values
    return seen.colour, render_places(fine, rays, t_RM, end_R, background).colour
