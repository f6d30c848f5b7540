"""Text to fine-tune on: completions and labelled texts, as tokens, packed and in batches."""

from wellposed.data.language.records import Completion as Completion
from wellposed.data.language.records import Labelled as Labelled
from wellposed.data.language.sources import LanguageData as LanguageData
from wellposed.data.language.sources import open_language as open_language
