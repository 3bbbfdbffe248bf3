"""From files to parameters: one set of names, whatever the file format."""

from .checkpoint import Checkpoint, WeightError
from .gguf import load_gguf

__all__ = ["Checkpoint", "WeightError", "load_gguf"]
