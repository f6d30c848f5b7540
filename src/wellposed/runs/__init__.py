"""What a run needs and leaves behind: a device, files written whole or not at all, where a number came from."""

from wellposed.runs.devices import device_named as device_named
from wellposed.runs.files import atomic_path as atomic_path
from wellposed.runs.files import write_json as write_json
from wellposed.runs.provenance import provenance as provenance
