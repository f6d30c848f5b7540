"""wellposed fit nerf: a scene from pictures, with full-rank, low-rank or sine layers."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import tyro

from wellposed.cli.runs_named import given_fields, named_default
from wellposed.fields.nerf_config import NerfConfig


def command(argv: Sequence[str]) -> Callable[..., None]:
    """The command; its flags default to what the file or the run that `argv` names has for them."""
    default = named_default(NerfConfig, "fit nerf", argv)

    def nerf(
        options: NerfConfig = default,
        kinds: tuple[Literal["full", "low-rank", "sine"], ...] = (),
        ranks: tuple[int, ...] = (),
        jobs: int = 1,
        config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    ) -> None:
        """Fit a network to a scene: PSNR and SSIM on held-out views, a turntable, and a weights file.

        Args:
            options: what to fit.
            kinds: fit once for each of these and of --ranks, and compare them in report.html and table.md.
            ranks: of the low-rank and sine layers that are compared; 1 5 10 20 30 with --kinds alone.
            jobs: how many of these are fitted at a time, in processes of their own.
            config: a .toml or .json file of these settings, which flags then override.
        """
        from wellposed.fields.nerf_fitting import fit_nerf
        from wellposed.studies.field_ranks import fit_or_compare

        fit_or_compare(options, fit_nerf, given_fields(options, default), kinds, ranks, jobs)

    return nerf
