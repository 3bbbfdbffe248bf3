"""Pure PyTorch definitions of every operation: slow, plain, the truth. Imports torch alone.

A function has its operation's name and takes its operation's arguments by position, without `out` and `backend`. It
computes in float64 and rounds once, to the dtype of its result.
"""
