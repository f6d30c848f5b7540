"""Labelled images: built-in sets that need no download, and real ones in the layouts their users have on disk."""

from wellposed.data.images import Dataset as Dataset
from wellposed.data.images import ImageSet as ImageSet
from wellposed.data.sets import SETS as SETS
from wellposed.data.sets import open_data as open_data
from wellposed.data.shapes import make_shapes as make_shapes
