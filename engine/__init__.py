"""The thin engine: what a language model needs around the kernels to answer a request."""

from kernels.dispatch import install_reference
from reference import OPERATIONS

# What has no native kernel yet runs on its reference, and `--backend reference` runs on nothing else.
install_reference(OPERATIONS)
