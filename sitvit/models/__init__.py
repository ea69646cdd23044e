"""The networks: tensors in, tensors out. Nothing here knows of noise schedules, files or training."""
