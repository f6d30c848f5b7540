"""The only place that knows how other libraries lay out a block."""

from wellposed.families.embeddings import EMBEDDINGS as EMBEDDINGS
from wellposed.families.embeddings import PatchEmbedding as PatchEmbedding
from wellposed.families.embeddings import embeddings as embeddings
from wellposed.families.family import BlockWeights as BlockWeights
from wellposed.families.family import Matrix as Matrix
from wellposed.families.finding import FAMILIES as FAMILIES
from wellposed.families.finding import Block as Block
from wellposed.families.finding import blocks as blocks
from wellposed.families.finding import check_operable as check_operable
from wellposed.families.finding import readable_name as readable_name
from wellposed.families.finding import unwrapped as unwrapped
from wellposed.families.surgery import SitedModule as SitedModule
from wellposed.families.surgery import Sites as Sites
from wellposed.families.surgery import drop_compiled_code as drop_compiled_code
from wellposed.families.surgery import library_class as library_class
from wellposed.families.surgery import set_sites as set_sites
from wellposed.families.surgery import sites_of as sites_of
from wellposed.families.trunks import Trunk as Trunk
from wellposed.families.trunks import keys_of as keys_of
from wellposed.families.trunks import trunk as trunk
