"""Views on the device: torchvision's, sample by sample, from one matrix of random numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from wellposed.data import DeviceLoader, make_shapes
from wellposed.data.crops import MultiCrop, boxes, coloured, resampled, softened, turned
from wellposed.errors import InvalidArgumentError


def images(count: int = 4, height: int = 20, width: int = 28) -> Tensor:
    return torch.rand(count, 3, height, width)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 12), st.integers(0, 18), st.integers(1, 8), st.integers(1, 10), st.integers(1, 24), st.booleans())
def test_crops_are_torchvisions(top: int, left: int, tall: int, wide: int, size: int, mirrored: bool) -> None:
    """Larger and smaller, with antialiasing, for boxes on whole pixels, which are all that torchvision knows."""
    pictures = images(2)
    box = torch.tensor([top, left, tall, wide]).float().expand(2, 1, 4)
    ours = resampled(pictures, box, torch.full((2, 1), mirrored), size)[:, 0]
    theirs = tv.resized_crop(pictures, top, left, tall, wide, [size, size], antialias=True)
    torch.testing.assert_close(ours, theirs.flip(-1) if mirrored else theirs, atol=2e-6, rtol=0)


def test_each_view_has_its_own_box() -> None:
    pictures = images(3)
    where = torch.tensor([[0, 0, 20, 28], [4, 6, 8, 8], [10, 2, 5, 9]]).float().expand(3, 3, 4).clone()
    where[1, 1] = torch.tensor([1.0, 2.0, 16.0, 3.0])
    mirrored = torch.tensor([[False, True, False]] * 3)
    ours = resampled(pictures, where, mirrored, 12)
    assert ours.shape == (3, 3, 3, 12, 12)
    for n in range(3):
        for v in range(3):
            theirs = tv.resized_crop(pictures[n], *where[n, v].int().tolist(), [12, 12], antialias=True)
            theirs = theirs.flip(-1) if mirrored[n, v] else theirs
            torch.testing.assert_close(ours[n, v], theirs, atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 10**6))
def test_boxes_lie_inside_and_have_the_area_asked_for(height: int, width: int, low: float, seed: int) -> None:
    numbers = torch.rand(4, 50, generator=torch.Generator().manual_seed(seed))
    found = boxes(*numbers, scale=(low, 1.0), height=height, width=width)
    top, left, tall, wide = found.unbind(-1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + tall <= height + 1e-4).all()
    assert (left + wide <= width + 1e-4).all()
    whole = (tall < height) & (wide < width) & (tall > 1) & (wide > 1)  # none of its sides was cut off
    expected = (low + (1 - low) * numbers[0]) * height * width
    torch.testing.assert_close((tall * wide)[whole], expected[whole], rtol=1e-4, atol=1e-4)
    aspects = (wide / tall)[whole]
    assert ((aspects > 0.749) & (aspects < 1.334)).all()
    constant = torch.full((50, 1, height, width), 0.7)
    views = resampled(constant, found[:, None], torch.zeros(50, 1, dtype=torch.bool), 5)
    torch.testing.assert_close(views, torch.full_like(views, 0.7), atol=1e-5, rtol=0)  # every pixel has weights


@pytest.mark.parametrize("change", ["brightness", "contrast", "saturation", "hue"])
@pytest.mark.parametrize("amount", [-0.4, -0.1, 0.0, 0.1, 0.4])
def test_colours_are_torchvisions(change: str, amount: float) -> None:
    views = images(2)[:, None]
    names = ("brightness", "contrast", "saturation", "hue")
    amounts = [torch.full((2, 1), amount if name == change else 0.0) for name in names]
    ours = coloured(views, *amounts, grey=torch.zeros(2, 1, dtype=torch.bool))[:, 0]
    adjust = getattr(tv, f"adjust_{change}")
    theirs = adjust(views[:, 0], amount if change == "hue" else 1 + amount)
    torch.testing.assert_close(ours, theirs, atol=2e-3 if change != "hue" else 1e-5, rtol=0)  # luma to three digits


def test_hues_of_greys_and_pure_colours() -> None:
    pure = torch.eye(3).view(1, 3, 3, 1)  # pixels red, green, blue
    torch.testing.assert_close(turned(pure, torch.tensor(1 / 3)), pure.roll(1, 1))
    plain = torch.full((1, 3, 2, 2), 0.4)
    assert torch.equal(turned(plain, torch.tensor(0.3)), plain)


def test_one_channel_has_no_colours() -> None:
    views = torch.rand(2, 1, 1, 6, 6)
    some = torch.full((2, 1), 0.3)
    same = coloured(views, 0 * some, 0 * some, some, some, grey=torch.ones(2, 1, dtype=torch.bool))
    torch.testing.assert_close(same, views)


def test_blur_is_a_gaussian() -> None:
    views = images(2, 33, 33)[:, None]
    sigma = torch.tensor([[1.3], [0.0]])
    ours = softened(views, sigma)
    theirs = tv.gaussian_blur(views[:1, 0], [21, 21], [1.3, 1.3])
    torch.testing.assert_close(ours[0, 0, :, 10:-10, 10:-10], theirs[0, :, 10:-10, 10:-10], atol=1e-6, rtol=0)
    assert torch.equal(ours[1], views[1])
    constant = torch.full((1, 1, 3, 9, 9), 0.3)
    torch.testing.assert_close(softened(constant, torch.tensor([[4.0]])), constant)


def all_views(**settings: object) -> MultiCrop:
    return MultiCrop(**{"global_size": 16, "local_size": 8, "local_crops": 3} | settings)  # type: ignore[arg-type]


def test_views_of_a_batch() -> None:
    crops, data = all_views(), make_shapes(6, 24).images
    large, small = crops(data, torch.rand(6, crops.columns))
    assert large.shape == (6, 2, 3, 16, 16)
    assert small.shape == (6, 3, 3, 8, 8)
    for views in (large, small):
        assert views.dtype == torch.float32
        assert views.is_contiguous()
        assert views.min() >= 0
        assert views.max() <= 1 + 1e-6
    none = all_views(local_crops=0)
    assert none(data, torch.rand(6, none.columns))[1].shape == (6, 0, 3, 8, 8)


def test_a_view_depends_on_its_own_row_alone() -> None:
    crops, data = all_views(), make_shapes(8, 24).images
    draws = torch.rand(8, crops.columns)
    whole = crops(data, draws)
    for start, stop in ((0, 4), (4, 8), (3, 4)):
        for all_of_it, part in zip(whole, crops(data[start:stop], draws[start:stop]), strict=True):
            torch.testing.assert_close(part, all_of_it[start:stop], atol=1e-6, rtol=0)
    other = draws.clone()
    other[0] = torch.rand(crops.columns)
    for before, after in zip(whole, crops(data, other), strict=True):
        assert not torch.allclose(before[0], after[0])
        assert torch.allclose(before[1:], after[1:])


def test_how_often_things_happen() -> None:
    """Of many views of a picture with one bright colour: greyness, solarization and mirroring can be read off."""
    count = 3000
    picture = torch.tensor([1.0, 0.7, 0.6]).view(1, 3, 1, 1).expand(count, 3, 8, 8) * 255
    crops = all_views(global_size=4, local_size=4, local_crops=1, jitter=0.0, blur=0.0)
    large, small = crops(picture.round().byte(), torch.rand(count, crops.columns))
    grey = (large[:, :, 0] - large[:, :, 2]).abs().amax((-2, -1)) < 1e-6
    assert grey.float().mean().item() == pytest.approx(0.2, abs=0.02)
    dark = large.mean((-3, -2, -1)) < 0.5
    assert not dark[:, 0].any()
    assert dark[:, 1].float().mean().item() == pytest.approx(0.2, abs=0.025)
    assert not (small.mean((-3, -2, -1)) < 0.5).any()
    slope = (torch.arange(8) * 30).view(1, 1, 1, 8).expand(count, 3, 8, 8).byte()
    for flip, share in ((True, 0.5), (False, 0.0)):
        plain = all_views(global_size=4, jitter=0.0, blur=0.0, solarize=0.0, flip=flip)
        views = plain(slope, torch.rand(count, plain.columns))[0]
        falling = (views[..., 0] > views[..., -1]).float().mean().item()
        assert falling == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_loader_hands_out_the_numbers(ranks: int) -> None:
    data = make_shapes(24, 16)
    options = {"seed": 3, "columns": 5}
    alone = list(DeviceLoader(data, 6, **options))  # type: ignore[arg-type]
    parts = [list(DeviceLoader(data, 6, rank=rank, ranks=ranks, **options)) for rank in range(ranks)]  # type: ignore[arg-type]
    for number, (pixels, draws) in enumerate(alone):
        assert pixels.dtype == torch.uint8
        assert draws.shape == (6, 5)
        assert torch.equal(pixels, torch.cat([part[number][0] for part in parts]))
        assert torch.equal(draws, torch.cat([part[number][1] for part in parts]))
    loader = DeviceLoader(data, 6, **options)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    again = DeviceLoader(data, 6, **options)  # type: ignore[arg-type]
    again.load_state_dict(loader.state_dict())
    for ours, theirs in zip(again, alone[1:], strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_size": 0}, "global_size=0"),
        ({"local_crops": -1}, "local_crops=-1"),
        ({"local_scale": (0.5, 0.2)}, "local_scale=(0.5, 0.2)"),
        ({"global_scale": (0.0, 1.0)}, "global_scale=(0.0, 1.0)"),
        ({"grey": 1.5}, "grey=1.5"),
        ({"blur": float("inf")}, "blur=inf"),
    ],
)
def test_what_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        all_views(**settings)
    assert message in str(refused.value)


@pytest.mark.gpu
def test_the_same_on_a_gpu_and_compiled() -> None:
    crops, data = all_views(), make_shapes(6, 24).images
    draws = torch.rand(6, crops.columns)
    expected = crops(data, draws)
    compiled = torch.compile(crops)
    for way in (crops, compiled):
        for ours, theirs in zip(way(data.cuda(), draws.cuda()), expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=0)
