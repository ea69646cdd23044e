"""The names that an experiment file may use; without torch, so that a misspelt one is answered at once."""

PATH_NAMES = ("linear", "gvp", "vp")
PREDICTIONS = ("velocity", "noise", "score", "data")
WEIGHTS = ("none", "velocity", "likelihood")
TIME_DISTRIBUTIONS = ("uniform", "logit_normal")
