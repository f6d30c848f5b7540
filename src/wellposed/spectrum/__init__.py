"""Measures of matrices: pure functions on batches of them."""

from wellposed.spectrum.measures import condition_number as condition_number
from wellposed.spectrum.measures import singular_values as singular_values
