"""What runs on the ranks that tests start: as processes, as threads, as whole programs.

Spawned processes import these modules, which avoid pytest and hypothesis: importing them takes time.
"""
