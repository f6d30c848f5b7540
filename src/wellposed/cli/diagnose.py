"""wellposed diagnose: the conditioning of any model, block by block."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wellposed.training.config import ModelArgs

_PICTURES = (".png", ".svg", ".pdf", ".jpg")


@dataclass(frozen=True)
class DiagnoseArgs:
    """What to look at, and where to write what is seen."""

    model: tyro.conf.Positional[str]
    """A timm name, a folder of wellposed's or HuggingFace's, or a .gguf file."""
    image: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Pictures, or folders of them; generated ones if neither this nor --data is given."""
    data: str | None = None
    """Look at test images of this set instead: digits, cifar10:PATH, ... as `wellposed train` has it."""
    text: str | None = None
    """For language models: a text, or a file that holds one."""
    count: int = 16
    """At most so many pictures, or rows of 128 tokens."""
    checkpoint: Path | None = None
    """Weights of a timm model, .safetensors or torch's; without, it is looked at as it is initialized."""
    model_args: ModelArgs = field(default_factory=dict)
    """Further arguments of timm.create_model, such as img_size 32 patch_size 4."""
    skips: bool = True
    """Keep the skip connections as they are, or cut them all first."""
    init: Literal["unchanged", "conditioned"] = "unchanged"
    """Overwrite the weights with the conditioned initialization first, or do not."""
    jacobians: bool = False
    """Also the extremes of the Jacobians of attention and MLP, for the first input; takes far longer."""
    html: Path | None = None
    """Write a page with curves and explanations to this file."""
    json: Path | None = None
    """Write all numbers to this file."""
    plot: Path | None = None
    """Write the curves to this picture file."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    seed: int = 0
    """Of the initialization, where there are no weights."""


def diagnose(args: DiagnoseArgs) -> None:
    """Print how well every block of a model is conditioned, and write it as a page, a picture or JSON.

    Args:
        args: what to look at.
    """
    import torch

    from wellposed.diagnosis import diagnose as run
    from wellposed.diagnosis.page import write_page
    from wellposed.diagnosis.sources import open_inputs, open_model
    from wellposed.errors import InvalidArgumentError
    from wellposed.runs import atomic_path, device_named, provenance
    from wellposed.skipless import condition_, cut_skips

    targets = [path for path in (args.html, args.json, args.plot) if path]
    for path in targets:
        if path.is_dir() or targets.count(path) > 1 or (path == args.plot and path.suffix not in _PICTURES):
            raise InvalidArgumentError(
                f"cannot write {path}: expected files of different names, and a picture as {', '.join(_PICTURES)}"
            )
    device = device_named(args.device)
    torch.manual_seed(args.seed)
    model = open_model(args.model, args.checkpoint, args.model_args)
    inputs = open_inputs(model, args.model, images=args.image, data=args.data, text=args.text, count=args.count)
    if not args.skips:
        cut_skips(model)
    if args.init == "conditioned":
        condition_(model)
    report = run(model.to(device).eval(), inputs, jacobians=args.jacobians)
    print(report)
    for path in targets:
        try:
            if path == args.html:
                write_page(report, path, provenance(device, seed=args.seed))
            elif path == args.json:
                with atomic_path(path) as temporary:
                    temporary.write_text(report.to_json(), encoding="utf-8")
            else:
                report.plot(path)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"cannot write {path}: {error}") from error
        print(f"written: {path}")
