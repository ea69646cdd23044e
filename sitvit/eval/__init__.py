"""From images to numbers: features, their statistics, distances, and the protocol beside each number."""
