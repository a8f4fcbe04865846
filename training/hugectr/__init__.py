"""HugeCTR v3.0's training API, with HugeCTR's names and order of arguments. See docs/hugectr-training.md."""

from training.hugectr.data_generator import (
    Check_t,
    DataGenerator,
    DataGeneratorParams,
    DataReaderType_t,
    Distribution_t,
    PowerLaw_t,
)
from training.hugectr.data_reader import DataReader32, DataReader64
from training.hugectr.learning_rate_scheduler import LearningRateScheduler, get_learning_rate_scheduler
from training.hugectr.model_oversubscriber import ModelOversubscriber
from training.hugectr.session import Session
from training.hugectr.solver import SolverParser, solver_parser_helper

__all__ = [
    "Check_t",
    "DataGenerator",
    "DataGeneratorParams",
    "DataReader32",
    "DataReader64",
    "DataReaderType_t",
    "Distribution_t",
    "LearningRateScheduler",
    "ModelOversubscriber",
    "PowerLaw_t",
    "Session",
    "SolverParser",
    "get_learning_rate_scheduler",
    "solver_parser_helper",
]
