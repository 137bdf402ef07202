from .layouts import layout_of as layout_of
from .scenes import MOST_RANKS as MOST_RANKS
from .scenes import Film as Film
from .scenes import film as film
from .step_pictures import Picture as Picture
from .step_pictures import moving_picture as moving_picture
from .step_pictures import steps_picture as steps_picture
from .time_pictures import time_picture as time_picture
