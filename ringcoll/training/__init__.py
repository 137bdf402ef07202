"""Training systems on the public functions.

================  ==========================================================
`data`            digits and text, and who sees which samples
`models`          a perceptron and a small transformer, and stages of them
`data_parallel`   data-parallel training, to read and to use
`gossip`          averages with neighbours, on a ring or an exponential graph
`local_sgd`       averages every H steps, and DiLoCo
`server`          a parameter server, synchronous or with bounded staleness
`compression`     compressed averages of gradients, with error feedback
`compressors`     the largest elements, numbers of 8 bits, low rank
`straggler`       a rank that is slow on purpose
`messages`        messages between two ranks, for gossip and the server
`flat`            the parameters of a module as a flat tensor
================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
