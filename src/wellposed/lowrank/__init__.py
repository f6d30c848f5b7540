"""Sine low-rank layers: more rank per parameter (arXiv 2403.19243)."""

from wellposed.lowrank.eager import sine_delta as sine_delta
from wellposed.lowrank.factorize import ParameterCounts as ParameterCounts
from wellposed.lowrank.factorize import factorize as factorize
from wellposed.lowrank.factorize import parameter_counts as parameter_counts
from wellposed.lowrank.functional import sine_linear as sine_linear
from wellposed.lowrank.linear import LowRankLinear as LowRankLinear
from wellposed.lowrank.linear import SineLinear as SineLinear
