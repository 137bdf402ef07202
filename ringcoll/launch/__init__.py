"""Ways to start ranks: as threads, as processes of this machine, by ``mpiexec``.

==============  ==========================================================
`threads`       ranks that are threads of this process
`processes`     a pool of processes that run functions
`mpi`           groups of the ranks of an MPI program
`mpiexec`       MPI programs, started and watched
==============  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
