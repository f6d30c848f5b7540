"""wellposed compress: an adapter in k bits, and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class CompressArgs:
    """What to compress, how far, and where to."""

    adapter: tyro.conf.Positional[Path]
    """A folder of PEFT's with a LoRA, DoRA, rsLoRA or sine adapter; with --expand, a packed one."""
    out: Path
    """The new folder."""
    bits: int | None = None
    """Of every number of the factors: 1 to 8. Give this, --budget or --max-error."""
    budget: str | None = None
    """Largest size of the file, such as 2MB or 500KiB; the bits of each factor are chosen for it."""
    max_error: float | None = None
    """Largest relative error of the update of a layer; the bits of each factor are chosen for it."""
    scheme: Literal["kmeans", "uniform", "normal", "stretched"] = "kmeans"
    """How the values that codes stand for are chosen: with the smallest error, in equal steps, as NormalFloat, or as by
    k-means and stretched, so that factors keep their length along themselves, at a larger error."""
    per: Literal["tensor", "row"] = "tensor"
    """What has a codebook of its own: each factor, or each of the r rows of A and columns of B."""
    expand: bool = False
    """Make an ordinary PEFT folder of a packed one."""
    json: Path | None = None
    """Write all errors to this file."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""


def compress(args: CompressArgs) -> None:
    """Pack an adapter into k bits per number, and print what that does to every layer.

    Args:
        args: what to compress.
    """
    from wellposed.compression import compress as run
    from wellposed.compression import expand
    from wellposed.errors import InvalidArgumentError
    from wellposed.runs import write_json

    if args.expand:
        if args.bits is not None or args.budget is not None or args.max_error is not None or args.json is not None:
            raise InvalidArgumentError("--expand with --bits, --budget, --max-error or --json: expected it alone")
        print(f"written: {expand(args.adapter, args.out)}")
        return
    report = run(
        args.adapter,
        bits=args.bits,
        scheme=args.scheme,
        out=args.out,
        per=args.per,
        budget=args.budget,
        max_error=args.max_error,
        device=args.device,
    )
    print(report)
    if args.json is not None:
        write_json(args.json, report.to_dict())
        print(f"written: {args.json}")
