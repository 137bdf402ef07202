"""The command line; ``ringcoll --help`` describes it.

================  =====================================================
`app`             the group of commands, how they describe themselves, and how they end
`output`          what commands write: tables, JSON, CSV, progress, pictures
`options`         arguments and options that several commands take
`measuring`       what the commands that measure share
`listing`         ``ringcoll list``, ``ringcoll new`` and ``ringcoll export``
`show`            ``ringcoll show``
`prove`           ``ringcoll verify``, ``ringcoll order``, and proofs in words and as data
`networks`        networks that are not here: ``ringcoll simulate`` and ``ringcoll plot``
`search`          the best schedules: ``ringcoll search``, ``ringcoll fit``, ``ringcoll pareto``
`doctor`          what is used here: ``ringcoll doctor``, ``ringcoll explain``, ``ringcoll info``
`speed`           this machine: ``ringcoll compare``, ``ringcoll tune``, ``ringcoll probe``
`bench`           ``ringcoll bench``, in the table of nccl-tests
`trace`           ``ringcoll trace``
`train`           ``ringcoll train``
`programs`        programs on ranks: ``ringcoll run`` and ``ringcoll dump``
================  =====================================================

A command's module is imported when the command is called, so that the list of commands
is quick. ``import ringcoll`` imports nothing of the command line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
