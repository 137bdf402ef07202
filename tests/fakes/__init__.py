"""Stand-ins: for CUDA, its streams and NCCL, for several hosts, for the planner and executor.

And an algorithm that is wrong, which the library has to notice.
"""
