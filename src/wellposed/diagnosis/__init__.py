"""What goes on inside a model, block by block."""

from wellposed.diagnosis.diagnose import diagnose as diagnose
from wellposed.diagnosis.probe import BlockState as BlockState
from wellposed.diagnosis.probe import probe as probe
from wellposed.diagnosis.report import BlockReport as BlockReport
from wellposed.diagnosis.report import Diagnosis as Diagnosis
from wellposed.diagnosis.watching import attention_seen as attention_seen
from wellposed.diagnosis.watching import calls_seen as calls_seen
