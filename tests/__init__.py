"""Tests. `support` is imported by test modules and by the processes that they start."""
