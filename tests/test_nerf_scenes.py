import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import grid_sample

from small_scenes import ANGLE, cameras, pictures_of_ball, write_blender
from wellposed.errors import DataError, InvalidArgumentError
from wellposed.fields.rays import camera_rays, to_ndc, within_box
from wellposed.fields.scenes import Scene, read_scene

DATA = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[2] / "shared" / "data"))
LEGO, FERN = DATA / "nerf_synthetic" / "lego", DATA / "llff" / "fern"


def write_llff(folder: Path, count: int = 9) -> Path:
    """Cameras beside each other that look along -z at a scene 4 to 8 away, in LLFF's own axes."""
    rows = []
    for i in range(count):
        pose = np.zeros((3, 5))
        right, up, back = np.eye(3)
        place = np.array([0.2 * (i - (count - 1) / 2), 0.1 * (i % 3 - 1), 0.0])
        pose[:, 0], pose[:, 1], pose[:, 2], pose[:, 3], pose[:, 4] = -up, right, back, place, (240.0, 320.0, 300.0)
        rows.append(np.concatenate([pose.ravel(), [4.0, 8.0]]))
        path = folder / "images_8" / f"image{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (10 * i, 0, 0)).save(path)
    np.save(folder / "poses_bounds.npy", np.array(rows))
    return folder


def test_blender_scene_comes_as_it_was_written(tmp_path: Path) -> None:
    scene = read_scene(write_blender(tmp_path), frames=5)
    poses = cameras(14)
    torch.testing.assert_close(torch.cat([scene.train.poses, scene.test.poses]), poses)
    pictures = pictures_of_ball(poses, 16)
    torch.testing.assert_close(scene.train.images, pictures[:12], atol=0.5 / 255 + 1e-6, rtol=0)
    assert scene.focal == pytest.approx(8 / math.tan(ANGLE / 2))
    assert scene.train.names[0] == "train/r_0.png"
    assert (scene.near, scene.far, scene.ndc, scene.size) == (2.0, 6.0, False, (16, 16))
    # A camera of the path looks at the origin, upright.
    torch.testing.assert_close(scene.path[:, :, 3], 4 * scene.path[:, :, 2])
    assert (scene.path[:, 2, 1] > 0).all()


def test_half_the_size_is_the_mean_of_four_pixels_under_the_same_camera(tmp_path: Path) -> None:
    whole, half = (read_scene(write_blender(tmp_path), downscale=scale) for scale in (1, 2))
    torch.testing.assert_close(half.train.images[3, 2, 5], whole.train.images[3, 4:6, 10:12].mean((0, 1)))
    rays = [camera_rays(scene.train.poses[:1], *scene.size, scene.focal) for scene in (whole, half)]
    fine = rays[0].directions.view(16, 16, 3)
    torch.testing.assert_close(rays[1].directions.view(8, 8, 3)[2, 5], fine[4:6, 10:12].mean((0, 1)))


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    write_blender(tmp_path)
    Image.new("RGBA", (16, 16), (255, 0, 0, 51)).save(tmp_path / "train" / "r_0.png")
    colour = read_scene(tmp_path).train.images[0, 0, 0]
    torch.testing.assert_close(colour, torch.tensor([1.0, 0.8, 0.8]), atol=1 / 255, rtol=0)


def _frames(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "transforms_train.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "train" / "r_3.png").unlink(), r"1 of 12 frames have no picture: .*r_3\.png"),
        (lambda folder: (folder / "train" / "r_3.png").write_bytes(b"no picture"), r"r_3\.png cannot be read"),
        (lambda folder: Image.new("RGB", (20, 16)).save(folder / "train" / "r_3.png"), r"r_3\.png .* 20 x 16 and 16 x"),
        (lambda folder: (folder / "transforms_test.json").unlink(), r"transforms_test\.json: there is no such file"),
        (lambda folder: (folder / "transforms_train.json").write_text("{"), "cannot be read"),
        (lambda folder: _frames(folder, lambda found: found.pop("frames")), "there is no 'frames'"),
        (lambda folder: _frames(folder, lambda found: found.update(frames=[])), "lists no frames"),
        (lambda folder: _frames(folder, lambda found: found.update(camera_angle_x=4)), "between 0 and pi"),
        (lambda folder: _frames(folder, lambda found: found["frames"][3].pop("transform_matrix")), "r_3 has no"),
        (
            lambda folder: _frames(folder, lambda found: found["frames"][3].update(transform_matrix=[[1.0] * 4] * 4)),
            "transform_matrix of ./train/r_3 is no camera",
        ),
        (shutil.rmtree, "there is no such folder"),
        (lambda folder: [path.unlink() for path in folder.glob("*.json")], "holds no scene"),
    ],
)
def test_a_blender_scene_with_something_wrong_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = write_blender(tmp_path / "scene")
    spoil(folder)
    with pytest.raises(DataError, match=message):
        read_scene(folder)


def test_a_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a divisor of 16 and 16"):
        read_scene(write_blender(tmp_path), downscale=3)


def test_llff_scene(tmp_path: Path) -> None:
    scene = read_scene(write_llff(tmp_path))
    assert scene.test.names == ("image000.png", "image008.png")
    assert len(scene.train) == 7
    assert scene.ndc
    assert scene.focal == pytest.approx(300 * 40 / 320)
    torch.testing.assert_close(scene.train.poses[:, :, :3], torch.eye(3).expand(7, 3, 3))
    # The nearest point, 4 away, comes to lie at 1 / 0.75: lengths are divided by 3. The mean camera is at the origin.
    torch.testing.assert_close(scene.train.poses[3, :, 3], torch.tensor([0.0, 0.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(scene.test.poses[1, :, 3], torch.tensor([0.8 / 3, 0.1 / 3, 0.0]))
    assert torch.linalg.det(scene.path[:, :, :3]).min() > 0.99


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "images_8" / "image004.png").unlink(), "8 pictures and poses_bounds.npy 9 cameras"),
        (lambda folder: np.save(folder / "poses_bounds.npy", np.zeros((9, 16))), "expected a row of 17"),
        (lambda folder: np.save(folder / "poses_bounds.npy", np.ones((9, 17))), "no rotations"),
        (lambda folder: (folder / "poses_bounds.npy").write_bytes(b"x"), "cannot be read"),
        (lambda folder: shutil.rmtree(folder / "images_8"), "holds no pictures"),
        (
            lambda folder: [Image.new("RGB", (40, 40)).save(path) for path in (folder / "images_8").iterdir()],
            "the same proportions",
        ),
    ],
)
def test_an_llff_scene_with_something_wrong_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = write_llff(tmp_path / "scene")
    spoil(folder)
    with pytest.raises(DataError, match=message):
        read_scene(folder)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    folder = write_llff(tmp_path)
    np.save(folder / "poses_bounds.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        read_scene(folder)


def test_ndc_rays_are_projections_of_the_points_of_the_ray() -> None:
    height, width, focal, near, far = 30, 40, 35.0, 1.0, 1e9
    origins, directions = torch.randn(50, 3).double() * 0.3, torch.randn(50, 3).double()
    directions[:, 2] = -directions[:, 2].abs() - 0.5
    # OpenGL's matrix of the perspective of a camera at the origin, with a far plane that is all but at infinity.
    projection = torch.tensor(
        [
            [2 * focal / width, 0, 0, 0],
            [0, 2 * focal / height, 0, 0],
            [0, 0, -(far + near) / (far - near), -2 * far * near / (far - near)],
            [0, 0, -1, 0],
        ],
        dtype=torch.float64,
    )
    start, way = to_ndc(origins, directions, height, width, focal)
    on_plane = origins - (near + origins[:, 2:]) / directions[:, 2:] * directions
    for t in (0.0, 0.7, 5.0, 200.0):
        point = on_plane + t * directions
        projected = torch.cat([point, torch.ones(50, 1)], 1) @ projection.T
        projected = projected[:, :3] / projected[:, 3:]
        # The appendix of NeRF: t' = 1 - z0 / (z0 + t dz).
        share = 1 - on_plane[:, 2:] / (on_plane[:, 2:] + t * directions[:, 2:])
        torch.testing.assert_close(start + share * way, projected, atol=1e-7, rtol=0)


def test_rays_enter_and_leave_a_box() -> None:
    box = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    rays = camera_rays(torch.tensor([[[1.0, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 1, 4]]]), 1, 1, 1.0)
    assert [float(each) for each in within_box(rays, box, 0.0, 10.0)] == [3.0, 5.0]
    assert [float(each) for each in within_box(rays, box, 3.5, 4.0)] == [3.5, 4.0]
    missed = rays._replace(origins=rays.origins + torch.tensor([2.0, 0, 0]))
    enters, leaves = within_box(missed, box, 0.0, 10.0)
    assert enters == leaves


@pytest.mark.skipif(not LEGO.is_dir(), reason="the Lego scene is not in WELLPOSED_DATA")
def test_real_lego() -> None:
    scene = read_scene(LEGO, downscale=8)
    assert (len(scene.train), len(scene.test)) == (100, 25)
    assert scene.focal == pytest.approx(1111.1110311937682 / 32, rel=1e-6)  # of 800 pixels, as the original has it
    # All cameras stand on a sphere of radius 4 and look at the middle, where the bricks are and white is not.
    torch.testing.assert_close(scene.train.poses[:, :, 3].norm(dim=1), torch.full((100,), 4.0311), atol=1e-3, rtol=0)
    torch.testing.assert_close(scene.train.poses[:, :, 2], scene.train.poses[:, :, 3] / 4.0311, atol=1e-3, rtol=0)
    assert scene.train.images[:, 12, 12].mean() < 0.7
    assert (scene.train.images[:, 0, 0] == 1).all()


@pytest.mark.skipif(not FERN.is_dir(), reason="the Fern scene is not in WELLPOSED_DATA")
def test_real_fern() -> None:
    scene = read_scene(FERN)
    assert (len(scene.train), len(scene.test), scene.size) == (17, 3, (378, 504))
    assert scene.focal == pytest.approx(3260.52633 / 8, rel=1e-5)
    rays = camera_rays(scene.train.poses, 2, 2, scene.focal / 252, ndc=True)
    # Rays begin on the near plane, z = -1, and end at infinity, z = 1.
    torch.testing.assert_close(rays.origins[:, 2], torch.full((68,), -1.0), atol=1e-5, rtol=0)
    torch.testing.assert_close((rays.origins + rays.directions)[:, 2], torch.ones(68), atol=1e-5, rtol=0)


def _seen_alike(scene: Scene, poses: Tensor) -> float:
    """Mean difference between the pixels of a view and, at the best depth of each, what another view has there."""
    (height, width), one, other = scene.size, poses[0], poses[5]
    rays, best = camera_rays(one[None], height, width, scene.focal), torch.full((height * width,), 9.0)
    for inverse_depth in torch.linspace(0.02, 0.75, 30):
        x, y, z = ((rays.origins + rays.directions / inverse_depth - other[:, 3]) @ other[:, :3]).unbind(1)
        place = torch.stack([-2 * scene.focal / width * x / z, 2 * scene.focal / height * y / z], -1)
        colours = grid_sample(scene.train.images[5:6].permute(0, 3, 1, 2), place[None, None], align_corners=False)
        error = (colours[0, :, 0].T - scene.train.images[0].reshape(-1, 3)).abs().mean(1)
        best = torch.where(place.abs().amax(1) < 1, best.minimum(error), best)
    return float(best[best < 9].mean())


@pytest.mark.skipif(not FERN.is_dir(), reason="the Fern scene is not in WELLPOSED_DATA")
def test_the_cameras_of_fern_agree_on_what_they_see() -> None:
    scene = read_scene(FERN, downscale=6)
    right = _seen_alike(scene, scene.train.poses)
    for axis in (0, 1):
        mirrored = scene.train.poses.clone()
        mirrored[:, axis, 3] *= -1
        assert right < 0.5 * _seen_alike(scene, mirrored)


@pytest.mark.parametrize("ndc", [False, True])
def test_rays_are_not_rounded_by_autocast(ndc: bool) -> None:
    poses = torch.linalg.qr(torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)))[0][:, :3]
    exact = camera_rays(poses, 20, 30, 25.0, ndc=ndc)
    local = torch.tensor([[(x + 0.5 - 15) / 25, -(y + 0.5 - 10) / 25, -1.0] for y in range(20) for x in range(30)])
    if not ndc:
        torch.testing.assert_close(exact.directions, (local @ poses[:, :, :3].mT).reshape(-1, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rays = camera_rays(poses, 20, 30, 25.0, ndc=ndc)
    assert torch.equal(rays.directions, exact.directions)
    assert torch.equal(rays.views, exact.views)
