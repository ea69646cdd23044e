"""From latents to a checkpoint."""
