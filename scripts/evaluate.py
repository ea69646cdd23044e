#!/usr/bin/env python
"""Measure sampled images against real ones; see --help."""

from sitvit.cli import evaluate, main

if __name__ == "__main__":
    main(evaluate)
