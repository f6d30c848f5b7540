"""What a run needs and leaves behind: a device, files written whole or not at all, checkpoints, metrics, provenance."""

from wellposed.runs.checkpoints import Checkpoints as Checkpoints
from wellposed.runs.checkpoints import step_of as step_of
from wellposed.runs.devices import device_named as device_named
from wellposed.runs.files import atomic_path as atomic_path
from wellposed.runs.files import is_free as is_free
from wellposed.runs.files import locked as locked
from wellposed.runs.files import write_json as write_json
from wellposed.runs.files import writing_to as writing_to
from wellposed.runs.journal import Journal as Journal
from wellposed.runs.journal import read_journal as read_journal
from wellposed.runs.progress import tracked as tracked
from wellposed.runs.provenance import provenance as provenance
