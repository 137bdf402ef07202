"""``init_process_group("ringcoll")``: a process group of torch.distributed. No algorithm code.

================  ==========================================================
`registration`    makes the name known to torch, without importing torch
`process_group`   the process group that torch makes
`options`         the options of a group
`c10d`            the table of c10d's collectives
`torch_gaps`      what torch has for its own groups only
`observed_calls`  calls that dispatch modes and the profiler see
`device_maps`     other backends beside this one in a group
`point_to_point`  the user's own sends and receives
================  ==========================================================
"""

import lazy_loader

# As the stub says. `import ringcoll` comes by here, and to parse a stub takes a millisecond.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "options": ["Options"],
        "point_to_point": ["PointToPoint"],
        "process_group": ["ProcessGroup"],
        "registration": ["when_torch_is_imported"],
    },
)
