"""What every test stands on: the references are in the dispatch table."""

from __future__ import annotations

import reference
from kernels.dispatch import install_reference

install_reference(reference.OPERATIONS)
