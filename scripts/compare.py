#!/usr/bin/env python
"""Compare networks: arms x seeds, paired, with a report; see --help."""

from sitvit.cli import compare, main

if __name__ == "__main__":
    main(compare)
