"""The command line; ``ringcoll --help`` describes it.

================  =====================================================
`app`             the group of commands, and how they end
`command`         how a command describes itself
`compare`         ``ringcoll compare``
`bench`           ``ringcoll bench``
`measuring`       what the commands that measure share
`nccl_table`      the table of nccl-tests, for ``ringcoll bench``
`listing`         ``ringcoll list``
`show`            ``ringcoll show``
`export`          ``ringcoll export``
`new`             ``ringcoll new``
`prove`           ``ringcoll verify``
`order`           ``ringcoll order``
`pareto`          ``ringcoll pareto``
`info`            ``ringcoll info``
`doctor`          ``ringcoll doctor``
`dump`            ``ringcoll dump``
`run`             ``ringcoll run``
`explain`         ``ringcoll explain``
`trace`           ``ringcoll trace``
`simulate`        ``ringcoll simulate``
`plot`            ``ringcoll plot``
`search`          ``ringcoll search``
`fit`             ``ringcoll fit``
`train`           ``ringcoll train``
`tune`            ``ringcoll tune``
`probe`           ``ringcoll probe``
`report`          a proof in words and as data
`output`          how results are printed
`picture_files`   pictures as SVG, pages, PNG, PDF and GIF
`parameters`      arguments and options that several commands take
`networks`        networks that a command is given
`versions`        versions of the software beside the package
================  =====================================================

A command's module is imported when the command is called, so that the list of commands
is quick. ``import ringcoll`` imports nothing of the command line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
