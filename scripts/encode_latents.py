#!/usr/bin/env python
"""Encode images into a latent cache; see --help."""

from sitvit.cli import encode_latents, main

if __name__ == "__main__":
    main(encode_latents)
