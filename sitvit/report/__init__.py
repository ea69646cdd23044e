"""Pictures and pages of what was run."""
