"""Speed as ratios within one run (`scripts/bench.py`): timing, and a file for each thing that is timed."""
