"""What goes on inside a model, block by block."""

from wellposed.diagnosis.probe import BlockState as BlockState
from wellposed.diagnosis.probe import attention_seen as attention_seen
from wellposed.diagnosis.probe import probe as probe
