"""Augmentation sample by sample, against loops and closed forms."""

from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.data import Augment, Mix, draw, make_shapes
from wellposed.data.augment import COLUMNS, _beta, _Row
from wellposed.errors import InvalidArgumentError

EVERYTHING = Augment(crop="resize", flip=True, geometry=0.7, colour=0.7, erase=0.5)
VARIANTS = {
    "nothing": Augment(),
    "pad": Augment(crop="pad", flip=True),
    "resize": Augment(crop="resize"),
    "geometry": Augment(geometry=1.0),
    "colour": Augment(colour=1.0),
    "erase": Augment(erase=1.0),
    "everything": EVERYTHING,
}


def rows(count: int, seed: int = 0) -> Tensor:
    return draw(count, torch.Generator().manual_seed(seed))


def pictures(count: int = 16, size: int = 20) -> Tensor:
    return make_shapes(count, size).images


@pytest.mark.parametrize("augment", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_sample_depends_on_its_own_row_alone(augment: Augment) -> None:
    images, draws = pictures(), rows(16)
    whole = augment(images, draws)
    assert whole.shape == images.shape
    assert whole.dtype == torch.float32
    assert whole.min() >= 0
    assert whole.max() <= 1
    parts = [augment(images[part], draws[part]) for part in (slice(0, 5), slice(5, 16))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    if augment != Augment():
        assert not torch.equal(augment(images, rows(16, seed=1)), whole)
        same_image = augment(images[:1].expand(16, -1, -1, -1), draws)
        assert len({tuple(image.flatten().tolist()) for image in same_image}) > 8, "samples are changed differently"


def test_nothing_is_nothing() -> None:
    images = pictures()
    assert torch.equal(Augment()(images, rows(16)), images / 255)


def test_padded_crops_and_flips_are_whole_pixels() -> None:
    images, draws = pictures(), rows(16)
    ours = Augment(crop="pad", padding=3, flip=True)(images, draws)
    seen = set()
    for i, image in enumerate(images):
        top, left = (int(7 * draws[i, k]) for k in range(2))
        expected = F.pad(image, (3,) * 4)[:, top : top + 20, left : left + 20]
        mirrored = bool(draws[i, 2] < 0.5)
        seen.add(mirrored)
        assert torch.equal(ours[i], (expected.flip(-1) if mirrored else expected) / 255)
    assert seen == {True, False}


def test_resampling_without_change_is_the_identity() -> None:
    images = pictures()
    torch.testing.assert_close(
        Augment(crop="resize", smallest_area=1.0, geometry=0.0)(images, torch.full((16, COLUMNS), 0.5)), images / 255
    )
    still = torch.full((16, COLUMNS), 0.9)  # no operation's chance comes up
    torch.testing.assert_close(Augment(geometry=1.0)(images, still), images / 255, rtol=0, atol=1e-4)
    torch.testing.assert_close(Augment(colour=1.0)(images, still), images / 255, rtol=0, atol=1e-5)


def test_resized_crops_show_a_part_of_the_image() -> None:
    ramp = torch.arange(0, 200, 10, dtype=torch.uint8).expand(64, 3, 20, 20)
    crops = Augment(crop="resize", smallest_area=0.3)(ramp, rows(64))[:, 0, 10] * 255
    slopes = (crops[:, 15] - crops[:, 5]) / 100
    assert slopes.max() <= 1.01
    assert slopes.min() < 0.75
    assert (slopes > 0.45).all(), "no part is smaller than the smallest area and aspect allow"


def test_erased_rectangles_have_the_asked_for_size() -> None:
    images = torch.zeros(500, 1, 40, 40, dtype=torch.uint8)
    erased = (Augment(erase=1.0)(images, rows(500)) == 0.5).float().mean((1, 2, 3))
    assert erased.min() > 0.01
    assert erased.max() < 0.36
    assert erased.mean().item() == pytest.approx(0.175, abs=0.015)
    some = (Augment(erase=0.25)(images, rows(500)) == 0.5).flatten(1).any(1).float().mean()
    assert some.item() == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_beta(alpha: float) -> None:
    drawn = _beta(_Row(rows(20_000)), alpha).flatten()
    assert (
        scipy.stats.kstest(drawn.numpy(), scipy.stats.beta(alpha, alpha).cdf).statistic < 0.025
    )  # in float32 numbers near 1 are 1


def targets(count: int) -> Tensor:
    return F.one_hot(torch.arange(count) % 10, 10).float()


def test_mixup() -> None:
    images = torch.rand(32, 3, 8, 8)
    mixed, probabilities = Mix(mixup=0.8)(images, targets(32), rows(32))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(32))
    for i in range(32):
        weight = probabilities[i, i % 10]
        torch.testing.assert_close(mixed[i], weight * images[i] + (1 - weight) * images[i ^ 1])


def test_cutmix() -> None:
    images = torch.arange(32.0).view(32, 1, 1, 1).expand(32, 3, 16, 16)
    mixed, probabilities = Mix(cutmix=1.0)(images, targets(32), rows(32))
    for i in range(32):
        own = (mixed[i] == i).float().mean()
        assert own + (mixed[i] == (i ^ 1)).float().mean() == 1
        torch.testing.assert_close(probabilities[i, i % 10], own)
    assert probabilities.max(1).values.min() < 0.9


def test_both_and_none() -> None:
    images, draws = torch.rand(64, 3, 8, 8), rows(64)
    mixed, _ = Mix(mixup=0.5, cutmix=1.0)(images, targets(64), draws)
    cut = ((mixed == images) | (mixed == images[torch.arange(64) ^ 1])).flatten(1).all(1)
    assert 15 < cut.sum() < 49
    same, _ = Mix()(images, targets(64), draws)
    assert same is images


@pytest.mark.parametrize(
    "make",
    [
        lambda: Augment(erase=1.5),
        lambda: Augment(geometry=-0.1),
        lambda: Augment(crop="centre"),
        lambda: Augment(smallest_area=0),
        lambda: Mix(mixup=2.0),
        lambda: Mix(cutmix=0.5)(torch.rand(3, 1, 4, 4), targets(3), rows(3)),
    ],
)
def test_bad_settings(make: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="expected"):
        make()
