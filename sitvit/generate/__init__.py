"""From a checkpoint and seeds to images."""
