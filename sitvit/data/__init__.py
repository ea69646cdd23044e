"""From images on disk to the (x_0, x_1, t, label) of a training step."""
