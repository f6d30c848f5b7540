"""Labelled images: built-in sets that need no download, and real ones in the layouts their users have on disk."""

from wellposed.data.augment import Augment as Augment
from wellposed.data.augment import Mix as Mix
from wellposed.data.augment import draw as draw
from wellposed.data.images import Dataset as Dataset
from wellposed.data.images import ImageSet as ImageSet
from wellposed.data.loader import DeviceLoader as DeviceLoader
from wellposed.data.loader import Loader as Loader
from wellposed.data.sets import SETS as SETS
from wellposed.data.sets import open_data as open_data
from wellposed.data.shapes import make_shapes as make_shapes
from wellposed.data.workers import WorkerLoader as WorkerLoader
from wellposed.data.workers import open_loader as open_loader
from wellposed.data.workers import sampled_images as sampled_images
from wellposed.data.workers import usual_statistics as usual_statistics
