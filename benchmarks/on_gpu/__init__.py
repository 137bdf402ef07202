"""Measure and check everything on a GPU; ``benchmarks/gpu.py`` runs it all.

===============  ==============================================================
`rows`           what a stage finds: rows of tables; how they are shown
`clock`          how long a GPU takes, without the host's time
`facts`          where it ran
`correctness`    the kernels against torch on the CPU: operators, dtypes, places
`bandwidth`      the kernels against a copy and torch, every dtype; shapes of launches
`host_time`      what the host needs to launch and to bind
`collectives`    collectives among processes; several on one GPU; over NCCL
`mps`            ranks on one GPU with NVIDIA's Multi-Process Service, and without
`rounding`       errors of bfloat16 sums; needs no GPU
`goals`          what has to be reached, and whether it was
`stages`         all of them by name
===============  ==============================================================

Where there is no GPU, everything but what makes no sense there runs on the CPU, with tiny sizes:
a rehearsal, which says nothing about speed.
"""
