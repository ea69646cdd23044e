#!/usr/bin/env python
"""Tokens, parameters, FLOPs and memory of models, compared; see --help."""

from sitvit.cli import geometry, main

if __name__ == "__main__":
    main(geometry)
