"""Transformers without skip connections: cut the skips, condition the weights (arXiv 2510.00345)."""

from wellposed.skipless.conditioning import condition_ as condition_
from wellposed.skipless.skips import BlockSkips as BlockSkips
from wellposed.skipless.skips import cut_skips as cut_skips
from wellposed.skipless.skips import restore_skips as restore_skips
from wellposed.skipless.skips import skips as skips
