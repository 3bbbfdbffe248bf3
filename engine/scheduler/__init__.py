"""Which requests run in a step, and how many tokens of each: one interface, a policy a module."""

from .base import Chunk, Limits, Scheduler
from .continuous import ContinuousScheduler

__all__ = ["Chunk", "ContinuousScheduler", "Limits", "Scheduler"]
