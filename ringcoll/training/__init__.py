"""Training systems on the public functions.

================  ==========================================================
`data`            digits and text, and who sees which samples
`models`          a perceptron and a small transformer, and stages of them
`data_parallel`   data-parallel training, to read and to use
================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
