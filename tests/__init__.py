"""Tests; a folder for each folder of the package.

`cases`, `fakes` and `programs` are imported by test modules and by the processes that they start.
"""
