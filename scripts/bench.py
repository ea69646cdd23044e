#!/usr/bin/env python
"""Measure speed; see --help."""

from sitvit.cli import bench, main

if __name__ == "__main__":
    main(bench)
