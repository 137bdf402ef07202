from .options import Options as Options
from .point_to_point import PointToPoint as PointToPoint
from .process_group import ProcessGroup as ProcessGroup
from .registration import when_torch_is_imported as when_torch_is_imported
