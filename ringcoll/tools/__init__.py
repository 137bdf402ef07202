"""Tools that look at the library from outside, as a user does.

The wing has no door of its own: the other wings import nothing from it. Users import from its
rooms, and from the root of the package.

===========  ============================================================
`tracing`    where the time of a program has gone
`testing`    the pytest plugin
`bench`      measuring, side by side with others
`cli`        the command line
`gone`       what has another place now, and what is gone
===========  ============================================================
"""
