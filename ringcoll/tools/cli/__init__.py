"""The command line; ``ringcoll --help`` describes it.

==================  ============================================================
`app`               the group of commands, how they describe themselves, and how they end
`output`            the output of commands: tables, JSON, CSV, progress, pictures
`options`           arguments and options that several commands take
`measuring`         options and ranks of the commands that measure
`list`              ``ringcoll list``
`new`               ``ringcoll new``
`export`            ``ringcoll export``
`show`              ``ringcoll show``
`prove`             proofs in words and as data
`verify`            ``ringcoll verify``
`order`             ``ringcoll verify --order``
`networks`          options that ask for a network that is not here
`simulate`          ``ringcoll simulate``
`plot`              ``ringcoll plot``, and the figure of crossovers
`pareto`            ``ringcoll plot pareto``
`search`            ``ringcoll search``
`fit`               ``ringcoll fit``
`doctor`            ``ringcoll doctor``
`versions`          ``ringcoll doctor --report``
`explain`           ``ringcoll explain``
`tune`              ``ringcoll tune``
`probe`             ``ringcoll probe``
`bench`             ``ringcoll bench``
`nccl_tests_table`  the table that ``ringcoll bench`` prints, in the layout of nccl-tests
`comparison`        ``ringcoll bench --vs native``
`trace`             ``ringcoll trace``
`train`             ``ringcoll train``
`run`               ``ringcoll run``
`dump`              ``ringcoll dump``
==================  ============================================================

A command's module is imported when the command is called, so that the list of commands
is quick. ``import ringcoll`` imports nothing of the command line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
