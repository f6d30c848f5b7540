import math

import pytest
import torch
from torch import Tensor

from small_scenes import CENTRE, COLOUR, ball, ball_seen, cameras, focal_of, pictures_of_ball
from wellposed.fields.nerf_network import NerfNetwork, encode
from wellposed.fields.occupancy_grid import OccupancyGrid
from wellposed.fields.rays import Rays, camera_rays
from wellposed.fields.rendering import composite, importance, render_hierarchical, render_places, stratified, sum_before

BOX = torch.tensor([[-1.5, -1.5, -1.5], [1.5, 1.5, 1.5]])


def ball_density(points: Tensor) -> Tensor:
    return ball(points, points)[0]


def rays_of_two_cameras(size: int = 16) -> Rays:
    return camera_rays(cameras(2), size, size, focal_of(size))


def test_a_slab_of_constant_density_has_its_closed_form() -> None:
    density, colour = torch.full((1, 200), 1.7), torch.tensor([0.2, 0.4, 0.6]).expand(1, 200, 3)
    seen = composite(density, colour, torch.full((1, 200), 2.5 / 200), background=1.0)
    through = math.exp(-1.7 * 2.5)
    torch.testing.assert_close(seen.colour, (1 - through) * colour[:, 0] + through)
    torch.testing.assert_close(seen.weights.sum(), torch.tensor(1 - through))


def test_gradients_of_the_rendering() -> None:
    density = (torch.rand(2, 5) + 0.1).requires_grad_()
    colour, length = torch.rand(2, 5, 3, requires_grad=True), torch.rand(2, 5) + 0.1
    composite(density, colour, length, background=1.0).colour[:, 0].sum().backward()
    # dC / dsigma_i = delta_i (T_{i+1} c_i - what is behind), by hand and in float64.
    s, c, d = density.detach().double(), colour.detach().double()[..., 0], length.double()
    left = torch.exp(-(s * d).cumsum(1))
    before = torch.cat([torch.ones(2, 1), left[:, :-1]], 1)
    weights = before - left
    behind = (weights * c).flip(1).cumsum(1).flip(1) - weights * c + left[:, -1:]
    torch.testing.assert_close(density.grad, (d * (left * c - behind)).float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(colour.grad[..., 0], weights.float())


def test_sums_before_are_exclusive_cumulative_sums() -> None:
    values = torch.rand(3, 7)
    torch.testing.assert_close(sum_before(values), values.cumsum(1) - values)


def test_the_ball_comes_out_where_the_camera_sees_it() -> None:
    size, poses = 24, cameras(2)
    for pose, rays in zip(poses, [camera_rays(pose[None], size, size, focal_of(size)) for pose in poses], strict=True):
        start, end = torch.full((size**2,), 2.0), torch.full((size**2,), 6.0)
        seen = render_places(ball, rays, stratified(start, end, 600, jitter=False), end, background=1.0)
        torch.testing.assert_close(seen.colour, ball_seen(rays), atol=0.02, rtol=0)
        # A pinhole camera: where the ball's middle is projected to is where its picture is.
        x, y, z = pose[:, :3].T @ (CENTRE - pose[:, 3])
        expected = torch.stack([size / 2 - focal_of(size) * y / -z, size / 2 + focal_of(size) * x / -z])
        dark = (1 - seen.colour[:, 2]).view(size, size)
        at = torch.arange(size) + 0.5
        found = torch.stack([(dark.sum(1) * at).sum(), (dark.sum(0) * at).sum()]) / dark.sum()
        assert (found - expected).abs().max() < 0.3


def test_stratified_places_lie_one_in_each_piece() -> None:
    start, end = torch.full((4,), 2.0), torch.tensor([6.0, 6.0, 4.0, 2.0])
    places = stratified(start, end, 8, jitter=True)
    share = (places[:3] - 2) / (end[:3, None] - 2) * 8
    assert (share.floor() == torch.arange(8)).all()
    assert (places[3] == 2).all()


def test_importance_follows_the_weights() -> None:
    edges, weights = torch.tensor([[0.0, 1.0, 3.0, 4.0]]), torch.tensor([[1.0, 0.0, 3.0]])
    for jitter in (True, False):
        drawn = importance(edges, weights, 4000, jitter=jitter)[0]
        histogram = torch.histc(drawn, 4, 0, 4) / 4000
        torch.testing.assert_close(histogram, torch.tensor([0.25, 0.0, 0.0, 0.75]), atol=2e-3, rtol=0)
        assert drawn[drawn > 3].mean() == pytest.approx(3.5, abs=1e-2)


def test_hierarchical_places_find_a_thin_wall() -> None:
    def wall(points: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        return 60.0 * (points[:, 2].abs() < 0.04), COLOUR.expand_as(points)

    rays = camera_rays(torch.tensor([[[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 4]]]), 4, 4, 8.0)
    slant = rays.directions.norm(dim=1, keepdim=True)
    exact = 1 - (1 - torch.exp(-60 * 0.08 * slant)) * (1 - COLOUR)
    _, fine = render_hierarchical(wall, wall, rays, 2.0, 6.0, (64, 128), 1.0, jitter=False)
    torch.testing.assert_close(fine, exact, atol=0.01, rtol=0)


def test_the_grid_leaves_out_what_is_empty_and_changes_nothing() -> None:
    rays = rays_of_two_cameras()
    grid = OccupancyGrid(BOX, cells=32, pieces=256, samples=2**16, background=1.0)
    everything = grid.pack(rays, 2.0, 6.0, jitter=False)
    assert not everything.complete.all()
    grid.rebuild(ball_density)
    packed = grid.pack(rays, 2.0, 6.0, jitter=False)
    assert packed.complete.all()
    assert (packed.pieces < packed.t.numel()).float().mean() < 0.4
    seen = grid.render(ball, rays, packed)
    torch.testing.assert_close(seen.colour, ball_seen(rays), atol=0.03, rtol=0)


def test_what_is_hidden_is_left_out_too() -> None:
    def dense(points: Tensor) -> Tensor:
        return 100 * ball_density(points)

    rays = rays_of_two_cameras()
    grid = OccupancyGrid(BOX, cells=48, pieces=256, samples=2**16, background=1.0)
    grid.rebuild(dense, rounds=40)
    inside = int((grid.pack(rays, 2.0, 6.0, jitter=False).places < 2**16).sum())
    grid.opaque.zero_()
    every = grid.pack(rays, 2.0, 6.0, jitter=False)
    assert inside < 0.6 * int((every.places < 2**16).sum())
    grid.rebuild(dense, rounds=1)
    seen = grid.render(lambda p, v: (dense(p), COLOUR.expand_as(p)), rays, grid.pack(rays, 2.0, 6.0, jitter=False))
    truth = ball_seen(rays)
    solid = (truth - COLOUR).abs().amax(1) < 0.05
    torch.testing.assert_close(seen.colour[solid], COLOUR.expand(int(solid.sum()), 3), atol=1e-3, rtol=0)


def test_a_batch_that_is_full_says_which_rays_are_whole_and_has_their_gradients() -> None:
    rays = rays_of_two_cameras(8)
    small, large = (OccupancyGrid(BOX, 16, 32, samples, 1.0) for samples in (500, 2**13))
    strength = torch.ones(2, requires_grad=True)
    colours = []
    for i, grid in enumerate((small, large)):
        packed = grid.pack(rays, 2.0, 6.0, jitter=False)
        seen = grid.render(lambda p, v, i=i: (strength[i] * ball_density(p), COLOUR.expand_as(p)), rays, packed)
        whole = small.pack(rays, 2.0, 6.0, jitter=False).complete
        colours.append(seen.colour[whole])
    assert 500 // 32 <= int(whole.sum()) < len(rays.origins)
    torch.testing.assert_close(colours[0], colours[1])
    torch.stack([each.sum() for each in colours]).sum().backward()
    assert strength.grad[0] == pytest.approx(float(strength.grad[1]), rel=1e-5)
    assert strength.grad[0] != 0


def test_without_a_background_the_last_piece_has_no_end() -> None:
    rays = rays_of_two_cameras(4)
    grid = OccupancyGrid(BOX, 8, 16, 2**10, None)
    grid.rebuild(lambda points: torch.zeros(len(points)))
    packed = grid.pack(rays, 2.0, 6.0, jitter=False)
    assert (packed.places < 2**10).sum(1).unique().tolist() == [1]
    seen = grid.render(lambda p, v: (torch.full_like(p[:, 0], 0.1), COLOUR.expand_as(p)), rays, packed)
    torch.testing.assert_close(seen.colour, COLOUR.expand(32, 3))


def test_the_grid_forgets_what_has_gone() -> None:
    grid = OccupancyGrid(BOX, 16, 64, 2**10, 1.0)
    for step in range(0, 320, 16):
        grid.update(ball_density, step)
    share = float(grid.occupied.float().mean())
    ball_share = 4 / 3 * math.pi * 0.7**3 / 27
    assert ball_share < share < 2.5 * ball_share
    for step in range(320, 320 + 64 * 120, 16):
        grid.update(lambda points: 4.0 * (points[:, 0] > 0), step)
    assert not grid.occupied[:7].any()


def test_the_encoding() -> None:
    x = torch.randn(5, 3)
    found = encode(x, 10)
    assert found.shape == (5, 64)
    torch.testing.assert_close(found[:, :3], x)
    torch.testing.assert_close(found[:, 3 + 3 * 9 + 1], torch.sin(512 * x[:, 1]))
    torch.testing.assert_close(found[:, 33 + 2], torch.cos(x[:, 2]))
    assert (found[:, 63] == 0).all()


def test_the_network_computes_what_its_layers_say() -> None:
    network = NerfNetwork(width=32, kind="sine", rank=3).fine
    points, views = torch.randn(7, 3), torch.nn.functional.normalize(torch.randn(7, 3), dim=1)
    place, view = encode(points, 10)[:, :63], encode(views, 4)[:, :27]
    hidden = place
    for i, layer in enumerate(network.layers):
        hidden = layer(torch.cat([hidden, place], 1) if i == 5 else hidden).relu()
    seen = network.view(torch.cat([network.feature(hidden), view], 1)).relu()
    density, colour = network(points, views)
    torch.testing.assert_close(colour, network.colour_head(seen).sigmoid())
    torch.testing.assert_close(density, torch.nn.functional.softplus(network.density_head(hidden)[:, 0] - 1))
    torch.testing.assert_close(network.density(points), density)


@pytest.mark.parametrize("kind", ["full", "low-rank", "sine"])
def test_every_weight_learns(kind: str) -> None:
    network = NerfNetwork(width=16, kind=kind, rank=2, coarse=True)
    rays = rays_of_two_cameras(4)
    coarse, fine = render_hierarchical(network.coarse, network.fine, rays, 2.0, 6.0, (8, 8), 1.0, jitter=True)
    (coarse + fine).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


def test_the_pictures_of_the_ball_have_something_to_see() -> None:
    pictures = pictures_of_ball(cameras(3), 16)
    assert ((pictures[..., 2] < 0.5).float().mean((1, 2)) > 0.05).all()
