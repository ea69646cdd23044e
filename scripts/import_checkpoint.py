#!/usr/bin/env python
"""Import or export network weights; see --help."""

from sitvit.cli import import_checkpoint, main

if __name__ == "__main__":
    main(import_checkpoint)
