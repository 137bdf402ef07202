"""What is tried, and how it is judged: inputs, calls, schedules, and their right results.

Hypothesis strategies are here, too; `calls`, `data` and `reference` are imported by ranks.
"""
