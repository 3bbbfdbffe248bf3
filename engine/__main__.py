"""python -m engine: generate text, or describe a model."""

import sys

from engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
