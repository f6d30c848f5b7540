"""The loaders' order, parts, mixing and resumption; and that worker processes change nothing about them."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from wellposed.data import (
    Augment,
    DeviceLoader,
    ImageSet,
    Loader,
    Mix,
    WorkerLoader,
    draw,
    make_shapes,
    open_data,
    open_loader,
)
from wellposed.errors import DataError, InvalidArgumentError

EVERYTHING = Augment(crop="resize", flip=True, geometry=0.7, colour=0.7, erase=0.5)
MIX = Mix(mixup=0.8, cutmix=1.0)
PLAIN: dict[str, Any] = {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}
Batches = list[tuple[Tensor, Tensor]]


def taken(loader: Loader, count: int) -> Batches:
    """The next `count` batches, over as many epochs as they take."""
    return list(itertools.islice((batch for _ in itertools.count() for batch in loader), count))


def assert_same(ours: Batches, theirs: Batches) -> None:
    for (images, targets), (their_images, their_targets) in zip(ours, theirs, strict=True):
        assert torch.equal(images, their_images)
        assert torch.equal(targets, their_targets)


def numbered(count: int) -> ImageSet:
    """Images that say which they are."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    return ImageSet("numbered", tuple(map(str, range(count))), images.contiguous(), torch.arange(count))


def test_an_epoch_holds_every_image_once() -> None:
    loader = DeviceLoader(numbered(50), 8, seed=3)
    assert len(loader) == 6
    epochs = [torch.cat([labels for _, labels in loader]) for _ in range(2)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 48
    assert not torch.equal(*epochs)
    ordered = DeviceLoader(numbered(50), 8, shuffle=False)
    assert len(ordered) == 7
    assert torch.cat([labels for _, labels in ordered]).tolist() == list(range(50))


def test_images_go_with_their_labels_and_are_normalized() -> None:
    data = numbered(100)
    loader = DeviceLoader(data, 10)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    expected = (labels / 255 - (data.images / 255).mean()) / (data.images / 255).std(correction=0)
    torch.testing.assert_close(images[:, 0, 0, 0], expected, rtol=1e-4, atol=1e-4)
    plain = DeviceLoader(data, 10, mean=torch.zeros(1, 1, 1), std=torch.ones(1, 1, 1))
    images, labels = next(iter(plain))
    torch.testing.assert_close(images[:, 0, 0, 0], labels / 255)


def test_the_same_seed_gives_the_same_batches() -> None:
    one, two, other = (DeviceLoader(make_shapes(40, 16), 8, seed=seed, augment=EVERYTHING) for seed in (1, 1, 2))
    for (a, la), (b, lb), (c, _) in zip(one, two, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(la, lb)
        assert not torch.equal(a, c)


def test_an_epoch_is_over_with_its_last_batch() -> None:
    loader = DeviceLoader(numbered(20), 5)
    for count, _ in enumerate(loader, start=1):
        if count == len(loader):
            break
    assert len(list(loader)) == 4


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 7])
def test_an_interrupted_epoch_goes_on_with_the_same_batches(stop: int) -> None:
    data = make_shapes(40, 16)
    whole = DeviceLoader(data, 8, seed=1, augment=EVERYTHING)
    batches = [batch for _ in range(3) for batch in whole]
    first = DeviceLoader(data, 8, seed=1, augment=EVERYTHING)
    seen = 0
    while seen < stop:
        for _ in first:
            seen += 1
            if seen == stop:
                break
    second = DeviceLoader(data, 8, seed=99, augment=EVERYTHING)
    second.load_state_dict(first.state_dict())
    rest = [batch for _ in range(3) for batch in second][: 15 - stop]
    for (ours, our_labels), (theirs, their_labels) in zip(rest, batches[stop:], strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(our_labels, their_labels)


def test_processes_share_the_batches_of_one() -> None:
    data = make_shapes(40, 16)
    alone = DeviceLoader(data, 8, seed=1, augment=EVERYTHING)
    halves = [DeviceLoader(data, 8, seed=1, augment=EVERYTHING, rank=rank, ranks=2) for rank in range(2)]
    for (whole, labels), (one, one_labels), (two, two_labels) in zip(alone, *halves, strict=True):
        torch.testing.assert_close(torch.cat([one, two]), whole, rtol=0, atol=1e-5)
        assert torch.equal(torch.cat([one_labels, two_labels]), labels)


@pytest.mark.parametrize("mix", [None, MIX])
def test_an_order_is_drawn_for_an_epoch_and_rows_for_a_batch(mix: Mix | None) -> None:
    data = make_shapes(20, 16)
    generator = torch.Generator().manual_seed(5)
    expected = []
    for _ in range(2):
        order = torch.randperm(20, generator=generator)
        for chosen in (order[:8], order[8:16]):
            images, targets = EVERYTHING(data.images[chosen], draw(8, generator)), data.labels[chosen]
            if mix:
                images, targets = mix(images, torch.eye(10)[targets], draw(8, generator))
            expected.append((images, targets))
    assert_same(taken(DeviceLoader(data, 8, seed=5, augment=EVERYTHING, mix=mix, **PLAIN), 4), expected)


# --- mixing


def test_mixing_blends_neighbours_and_their_classes() -> None:
    (mixed, targets), (images, labels) = (
        next(iter(DeviceLoader(numbered(40), 8, mix=mix))) for mix in (Mix(mixup=1.0), None)
    )
    assert targets.shape == (8, 40)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    own = targets.gather(1, labels[:, None])[:, :, None, None]
    partners = images[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])]
    torch.testing.assert_close(mixed, own * images + (1 - own) * partners, rtol=1e-4, atol=1e-4)


def test_a_mix_that_does_not_mix_is_none() -> None:
    data = make_shapes(40, 16)
    assert_same(
        taken(DeviceLoader(data, 8, augment=EVERYTHING, mix=Mix()), 7),
        taken(DeviceLoader(data, 8, augment=EVERYTHING), 7),
    )


def test_processes_mix_as_one_does() -> None:
    data = make_shapes(40, 16)
    alone, *halves = (
        taken(DeviceLoader(data, 8, augment=EVERYTHING, mix=MIX, rank=rank, ranks=ranks), 7)
        for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    for whole, one, two in zip(alone, *halves, strict=True):
        for ours, first, second in zip(whole, one, two, strict=True):
            torch.testing.assert_close(torch.cat([first, second]), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 11}, "batch_size=11: expected 1 to 10"),
        ({"batch_size": 5, "ranks": 2}, "multiple of the 2 processes"),
        ({"batch_size": 4, "ranks": 2, "rank": 2}, "rank=2, ranks=2: expected"),
        ({"batch_size": 5, "mix": MIX}, r"batch_size=5, ranks=1: mixing pairs .* multiple of 2$"),
        ({"batch_size": 6, "mix": MIX, "ranks": 2}, r"batch_size=6, ranks=2: mixing pairs .* multiple of 4$"),
        ({"batch_size": 4, "mix": MIX, "ranks": 2, "shuffle": False}, "multiple of 4, also as the size of shapes"),
        ({"batch_size": 4, "workers": -1}, "workers=-1: expected"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        WorkerLoader(make_shapes(10, 16), **({"workers": 0} | arguments))


# --- worker processes


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"augment": EVERYTHING, "seed": 3},
        {"augment": EVERYTHING, "mix": MIX, "rank": 1, "ranks": 2},
        {"shuffle": False, "rank": 0, "ranks": 8},  # of the last batch, of 2, this process gets nothing
    ],
    ids=["all", "mixed part", "in order"],
)
def test_workers_give_the_batches_of_the_device(workers: int, options: dict[str, Any]) -> None:
    data = make_shapes(42, 16)
    ours = WorkerLoader(data, 8, workers=workers, **options, **PLAIN)
    theirs = DeviceLoader(data, 8, **options, **PLAIN)
    assert len(ours) == len(theirs)
    assert_same(taken(ours, 13), taken(theirs, 13))


@pytest.mark.parametrize("stop", [2, 5, 6])
def test_what_workers_read_ahead_does_not_count(stop: int) -> None:
    data = make_shapes(40, 16)
    options: dict[str, Any] = {"augment": EVERYTHING, "mix": MIX, **PLAIN}
    expected = taken(DeviceLoader(data, 8, seed=1, **options), 12)
    first = WorkerLoader(data, 8, seed=1, workers=2, **options)
    assert_same(taken(first, stop), expected[:stop])
    second = WorkerLoader(data, 8, seed=9, workers=0, **options)
    second.load_state_dict(first.state_dict())
    assert_same(taken(second, 12 - stop), expected[stop:])
    assert_same(taken(first, 12 - stop), expected[stop:])


def test_workers_leave_the_global_random_numbers_alone() -> None:
    loader = WorkerLoader(make_shapes(20, 16), 4, workers=0)
    before = torch.get_rng_state()
    taken(loader, 7)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_survive_an_interrupt_and_stay_for_the_next_epoch() -> None:
    loader = WorkerLoader(make_shapes(40, 16), 4, workers=2)
    others = set(multiprocessing.active_children())
    taken(loader, 1)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) >= 2
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGINT)
    taken(loader, 25)
    assert workers >= set(multiprocessing.active_children()) - others
    assert all(worker.is_alive() for worker in workers)


def test_workers_end_with_the_process_they_read_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import multiprocessing, os
from wellposed.data import WorkerLoader, make_shapes
if __name__ == "__main__":
    batches = iter(WorkerLoader(make_shapes(40, 16), 4, workers=2))
    next(batches)
    print(len(multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), 9)
""")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    process = subprocess.Popen([sys.executable, script], **pipes)
    try:
        output, _ = process.communicate(timeout=240)  # until the last of them closes it
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert int(output) >= 2
    assert process.returncode == -signal.SIGKILL


def test_workers_end_with_a_loader_in_a_reference_cycle() -> None:
    loader: Any = WorkerLoader(make_shapes(40, 16), 4, workers=2)
    taken(loader, 1)
    loader.itself = loader
    del loader
    start = time.monotonic()
    gc.collect()
    assert time.monotonic() - start < 4


def test_there_are_no_more_workers_than_processors() -> None:
    assert 1 <= WorkerLoader(make_shapes(20, 16), 4, workers=10_000).workers <= (os.cpu_count() or 1)


def test_usual_statistics() -> None:
    colour, grey = WorkerLoader(make_shapes(20, 16), 4, workers=0), WorkerLoader(numbered(20), 4, workers=0)
    assert torch.equal(colour.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    assert torch.equal(colour.std.flatten(), torch.tensor([0.229, 0.224, 0.225]))
    images, labels = next(iter(grey))
    torch.testing.assert_close(images[:, 0, 0, 0], (labels / 255 - 0.5) / 0.5)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for number, name in enumerate(["cat", "dog"] * 4):
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / "train" / name / f"{number}.png")
    return tmp_path


def test_a_folder_is_read_by_workers(photographs: Path) -> None:
    loader = open_loader(open_data(f"folder:{photographs}", image_size=16), 4, workers=2, **PLAIN)
    assert isinstance(loader, WorkerLoader)
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    numbers = (images[:, 0, 8, 8] * 255).round().long()
    assert sorted(numbers.tolist()) == list(range(8))
    assert torch.equal(numbers % 2, labels)
    assert isinstance(open_loader(make_shapes(20, 16), 4, workers=2), DeviceLoader)
    with pytest.raises(InvalidArgumentError, match="data=folder: expected an ImageSet"):
        DeviceLoader(open_data(f"folder:{photographs}", image_size=16), 4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_named_and_can_be_mended(workers: int, photographs: Path) -> None:
    file = photographs / "train" / "dog" / "5.png"
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])
    data = open_data(f"folder:{photographs}", image_size=16)
    loader = WorkerLoader(data, 2, workers=workers, augment=EVERYTHING)
    read: Batches = []
    with pytest.raises(DataError, match=r"5\.png cannot be read as a picture: [^\n]*$") as caught:
        read.extend(loader)
    assert type(caught.value) is DataError
    assert "Traceback" not in str(caught.value)
    file.write_bytes(whole)
    assert_same(read + list(loader), list(WorkerLoader(data, 2, workers=0, augment=EVERYTHING)))


class Lying:
    """A set whose images are not what it says."""

    name, classes, image_shape = "lying", ("only",), (3, 8, 8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 8, 8, dtype=torch.uint8), 0


def test_images_of_another_shape() -> None:
    with pytest.raises(DataError, match=r"image 0 of lying is torch\.uint8 \(1, 8, 8\), expected uint8 \(3, 8, 8\)"):
        list(WorkerLoader(Lying(), 2, workers=0, shuffle=False))


@pytest.mark.gpu
def test_workers_give_the_batches_of_the_device_on_a_gpu() -> None:
    data = make_shapes(42, 16)
    options: dict[str, Any] = {"augment": EVERYTHING, "mix": MIX, "device": "cuda", **PLAIN}
    ours = taken(WorkerLoader(data, 8, workers=2, **options), 13)
    assert ours[0][0].is_cuda
    assert_same(ours, taken(DeviceLoader(data, 8, **options), 13))


def test_compiled_batches_are_the_same_up_to_rounding() -> None:
    data = make_shapes(12, 16, seed=0)
    plain, compiled = (DeviceLoader(data, 4, augment=EVERYTHING, mix=MIX, compile=compile) for compile in (False, True))
    for (images, targets), (same_images, same_targets) in zip(plain, compiled, strict=True):
        # rounding may take a colour across the edge of a posterized level
        assert ((images - same_images).abs() > 1e-4).float().mean() < 0.01
        torch.testing.assert_close(same_targets, targets)
