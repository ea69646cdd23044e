#!/usr/bin/env python
"""Train the small autoencoder of the demo; see --help."""

from sitvit.cli import main, train_autoencoder

if __name__ == "__main__":
    main(train_autoencoder)
