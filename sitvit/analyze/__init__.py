"""What a trained network has learnt: linear probes, attention, token norms, gates."""
