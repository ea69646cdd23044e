"""Arms that are trained on one stream, evaluated under one protocol, and compared pair by pair."""
