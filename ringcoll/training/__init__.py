"""Training systems on the public functions.

================  ==========================================================
`data_parallel`   data-parallel training, to read and to use
================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
