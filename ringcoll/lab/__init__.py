"""The laboratory: networks that are not here. It reads schedules; no torch.

==============  =========================================================
`simulation`    a schedule on a network, with time that is computed
`search`        schedules that are found, and fitted to a network
`formats`       schedules and networks in the files of other systems
`pictures`      schedules as pictures, and the page that plays them
==============  =========================================================
"""
