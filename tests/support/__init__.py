"""What tests share: reference results, inputs, cases, and functions that run on ranks.

Nothing that spawned processes import, imports pytest or hypothesis: that takes time.
"""
