"""These modules hold no doctests; what they import takes seconds, and warns."""

collect_ignore_glob = ["*.py"]
