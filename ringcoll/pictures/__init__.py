"""Pictures of schedules, as SVG and as a page that plays. Pure, but that the page is read from the package.

================  ======================================================================
`scenes`          what is drawn: the messages of each step, and what the ranks hold between steps
`layouts`         where ranks are drawn: a ring, a tree, a line, a cube, hosts
`svg`             elements of SVG as text, the colours, light and dark
`step_pictures`   steps side by side, one of them, or one after the other
`grid_pictures`   the step-by-rank grid
`networks`        a network, with the bandwidth and latency of each link
`curve_pictures`  times over sizes, and where one algorithm overtakes another
`time_pictures`   what each rank of a run does when, simulated or measured
`traces`          the last operation of a trace
`player`          one page that plays schedules, built from `player/`
`notebook`        what a notebook shows of schedules, proofs and simulated runs
================  ======================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
