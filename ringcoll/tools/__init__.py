"""What looks at the library from outside, as a user does.

===========  ============================================================
`tracing`    where the time of a program has gone
`testing`    the pytest plugin
`bench`      measuring, side by side with others
`cli`        the command line
`gone`       what has another place now, and what is gone
===========  ============================================================
"""
