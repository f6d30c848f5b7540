"""What was done to a model, and how model and recipe travel together."""

from wellposed.recipes.recipe import check_same_changes as check_same_changes
from wellposed.recipes.recipe import recipe as recipe
from wellposed.recipes.recipe import replay as replay
from wellposed.recipes.store import WEIGHTS as WEIGHTS
from wellposed.recipes.store import describe as describe
from wellposed.recipes.store import load as load
from wellposed.recipes.store import save as save
from wellposed.recipes.store import write as write
