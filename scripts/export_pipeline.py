#!/usr/bin/env python
"""Export a run as a diffusers pipeline; see --help."""

from sitvit.cli import export_pipeline, main

if __name__ == "__main__":
    main(export_pipeline)
