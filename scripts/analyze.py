#!/usr/bin/env python
"""Look inside trained networks: probes, attention, token norms, gates; see --help."""

from sitvit.cli import analyze, main

if __name__ == "__main__":
    main(analyze)
