"""``init_process_group("ringcoll")``: a process group of torch.distributed. No algorithm code.

================  ==========================================================
`registration`    makes the name known to torch, without importing torch
`process_group`   the process group that torch makes
`c10d`            options, the table of c10d's collectives, and what torch lacks
`device_maps`     other backends beside this one in a group
`point_to_point`  the user's own sends and receives
================  ==========================================================
"""

import lazy_loader

# As the stub says. `import ringcoll` comes by here, and to parse a stub takes a millisecond.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "c10d": ["Options"],
        "point_to_point": ["PointToPoint"],
        "process_group": ["ProcessGroup"],
        "registration": ["when_torch_is_imported"],
    },
)
