"""The laboratory: networks that are not here. It reads schedules; no torch.

==============  =========================================================
`simulation`    a schedule on a network, with time that is computed
`search`        schedules that are found, and fitted to a network
`formats`       schedules and networks in the files of other systems
`pictures`      schedules as pictures, and the page that plays them
==============  =========================================================

What most programs need stands here::

    from ringcoll.lab import fit, player_page, simulate, topology_named
"""

from ringcoll._package import late_door

__getattr__, __dir__ = late_door(__name__, __file__)
