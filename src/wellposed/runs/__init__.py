"""What a run leaves behind: files written whole or not at all, and where a number came from."""

from wellposed.runs.files import atomic_path as atomic_path
from wellposed.runs.files import write_json as write_json
from wellposed.runs.provenance import provenance as provenance
