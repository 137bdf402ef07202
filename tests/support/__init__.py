"""What tests share: reference results, inputs, cases, and functions that run on ranks.

Nothing here imports pytest or hypothesis, as spawned processes import it too.
"""
