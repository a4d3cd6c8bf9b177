"""The sections of a job file, one module each, as frozen pydantic models; `Job` holds all of them.

Imports corpus, the engine's byte sizes and the cache policy. Imports nothing that reads a file or opens a model.
"""

from kvbatch.job_file.sections.base import Section
from kvbatch.job_file.sections.cache import CacheSection
from kvbatch.job_file.sections.engine import EngineSection
from kvbatch.job_file.sections.generation import GenerationSection
from kvbatch.job_file.sections.input import InputSection
from kvbatch.job_file.sections.job import Job
from kvbatch.job_file.sections.limits import LimitsSection
from kvbatch.job_file.sections.long_document import LongDocumentSection
from kvbatch.job_file.sections.model import ModelSection
from kvbatch.job_file.sections.output import OutputSection
from kvbatch.job_file.sections.prompt import Cleaning, PromptSection
from kvbatch.job_file.sections.quality_guard import QualityGuardSection

__all__ = [
    "CacheSection",
    "Cleaning",
    "EngineSection",
    "GenerationSection",
    "InputSection",
    "Job",
    "LimitsSection",
    "LongDocumentSection",
    "ModelSection",
    "OutputSection",
    "PromptSection",
    "QualityGuardSection",
    "Section",
]
