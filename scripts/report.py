#!/usr/bin/env python
"""Write the report of one or more runs; see --help."""

from sitvit.cli import main, report

if __name__ == "__main__":
    main(report)
