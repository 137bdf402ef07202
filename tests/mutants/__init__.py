"""Mutation testing: does a test fail if a line of the library is wrong?

`make mutants` changes one place of a file at a time, with the operators of cosmic-ray and two of its
own, and runs the unit tests that are near that file. ``mutants.toml`` says which files, which operators
and which tests; ``accepted.toml`` lists the mutants that no test can, or should, tell from the library,
each with the reason.
"""
