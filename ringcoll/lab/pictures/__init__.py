"""Pictures of schedules, as SVG and as a page that plays.

The functions are pure, except that `player` reads its page from the package.

================  ======================================================================
`svg`             elements of SVG as text, their colours, and where ranks and switches are drawn
`step_pictures`   steps side by side, one of them, or one after the other; the grid
`time_pictures`   what each rank of a run does when; times over sizes
`player`          one page that plays schedules, built from `player/`; what a notebook shows
================  ======================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
