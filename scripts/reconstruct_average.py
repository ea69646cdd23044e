#!/usr/bin/env python
"""Make an average of another length out of a run's snapshots; see --help."""

from sitvit.cli import main, reconstruct_average

if __name__ == "__main__":
    main(reconstruct_average)
