"""Measured comparisons with what a user would do otherwise, each in one run on one machine."""

from wellposed.bench.adapters import AdaptersBench as AdaptersBench
from wellposed.bench.attention import AttentionBench as AttentionBench
from wellposed.bench.compress import CompressBench as CompressBench
from wellposed.bench.condition import ConditionBench as ConditionBench
from wellposed.bench.diagnose import DiagnoseBench as DiagnoseBench
from wellposed.bench.dino import DinoBench as DinoBench
from wellposed.bench.discover import DiscoverBench as DiscoverBench
from wellposed.bench.graying import GrayingBench as GrayingBench
from wellposed.bench.jacobian import JacobianBench as JacobianBench
from wellposed.bench.soap import SoapBench as SoapBench
from wellposed.bench.train import TrainBench as TrainBench
