from . import conjugate as conjugate
