"""Transports: point-to-point messages, and nothing else.

===========  ==========================================================
`base`       what a transport is, and a transport around another one
`catalogue`  one entry a transport; nothing else lists them
`meeting`    how ranks meet before their first message
`narrow`     another transport, rounded to a wire dtype
`staged`     another transport, with CUDA tensors that pass through host memory
`pairs`      a transport inside each host, and another one between hosts
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
