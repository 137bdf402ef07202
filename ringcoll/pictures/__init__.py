"""Pictures of schedules, as SVG and as a page that plays.

Pure, but that the page is read from the package.

================  ======================================================================
`svg`             elements of SVG as text, the colours, light and dark
`layouts`         where ranks and switches are drawn; a network with its links
`step_pictures`   steps side by side, one of them, or one after the other; the grid
`curve_pictures`  times over sizes, and where one algorithm overtakes another
`time_pictures`   what each rank of a run does when, simulated or measured
`player`          one page that plays schedules, built from `player/`
`notebook`        what a notebook shows of schedules, proofs and simulated runs
================  ======================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
