"""Transports: point-to-point messages, and nothing else.

===========  ==========================================================
`base`       what a transport is, and a transport around another one
`catalogue`  one entry a transport; nothing else lists them
`around`     narrower dtypes, CUDA tensors through host memory, another transport between hosts
`faulty`     another transport, with faults on purpose, or with a checksum beside each message
`gloo`       a process group of torch's gloo, CPU tensors
`nccl`       grouped batches on a process group of torch's NCCL
`shared`     memory that the ranks of one host share, CPU tensors
`ucx`        UCX: shared memory, TCP, CUDA IPC; CPU and CUDA tensors
`local`      k ranks in one process, with threads or step by step
`streams`    CUDA streams: where a group's operations run on a GPU
===========  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
