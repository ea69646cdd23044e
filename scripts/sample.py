#!/usr/bin/env python
"""Sample images from a checkpoint; see --help."""

from sitvit.cli import main, sample

if __name__ == "__main__":
    main(sample)
