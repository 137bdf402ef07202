from .runner import Pipeline as Pipeline
from .runner import PipelineReport as PipelineReport
