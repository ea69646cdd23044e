#!/usr/bin/env python
"""Train the small classifier of FD-fashion; see --help."""

from sitvit.cli import main, train_classifier

if __name__ == "__main__":
    main(train_classifier)
