#!/usr/bin/env python
"""Fetch a data set; see --help."""

from sitvit.cli import fetch_data, main

if __name__ == "__main__":
    main(fetch_data)
