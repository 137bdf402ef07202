"""``init_process_group("ringcoll")``: a process group of torch.distributed. No algorithm code.

================  ==========================================================
`registration`    makes the name known to torch, without importing torch
`options`         options of a group
`process_group`   the process group that torch makes
`c10d`            the table of c10d's collectives and their public functions
`device_maps`     other backends beside this one in a group
`observers`       what dispatch modes and the profiler see of a call
`point_to_point`  the user's own sends and receives
`torch_gaps`      replacements for what torch lacks
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
