"""Transports: point-to-point messages, and nothing else.

===============  ==========================================================
`base`           what a transport is
`catalogue`      one entry a transport; nothing else lists them
`around`         a transport around another one
`faulty`         another transport, with faults on purpose
`verified`       another transport, with a checksum beside each message
`asked`          a transport with what the program or the environment asks for around it
`gloo`           a process group of torch's gloo, CPU tensors
`nccl`           grouped batches on a process group of torch's NCCL
`shared`         memory that the ranks of one host share, CPU tensors
`pairs`          one transport inside each host, and another between hosts
`ucx`            UCX: shared memory, TCP, CUDA IPC; CPU and CUDA tensors
`ucx_library`    the library UCX: contexts, and the memory it reaches
`mpi`            MPI, with the `mpiexec` and library of the user's; CPU tensors
`local`          k ranks in one process, with threads or step by step
`narrow`         another transport, with messages in a narrower dtype
`staged`         another transport, with CUDA tensors that pass through host memory
`tensor_memory`  the check that a tensor passes before its address is read
`streams`        CUDA streams: where a group's operations run on a GPU
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
