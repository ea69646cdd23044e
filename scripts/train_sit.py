#!/usr/bin/env python
"""Train a SiT velocity network; see --help."""

from sitvit.cli import main, train_sit

if __name__ == "__main__":
    main(train_sit)
