"""A thin, exact training toolkit over HuggingFace accelerate."""

from .callbacks.base import Callback
from .checkpoint import CheckpointConfig
from .collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    main_process_first,
    reduce_mean,
    reduce_sum,
    scatter,
)
from .command_line import main
from .config import load_config, parse_config, save_config
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ExitCode,
    OutputError,
    ProcessError,
    UserError,
)
from .evaluation import Evaluator
from .launching import launch
from .loader import DatasetEvalLoader, DatasetLoader, build_dataset_loaders
from .metrics import ConfusionMatrix, EvaluateMetric, MeanLoss, TopKAccuracy
from .optimizer import OptimizerConfig, build_optimizer
from .plan import BatchConfig, BatchPlan
from .recipe import build_trainer
from .run import Run, start_run
from .run_config import RecipeConfig, RunConfig
from .runtime import RuntimeConfig
from .sample_reader import SampleReader
from .schedule import Schedule, ScheduleConfig, build_schedule
from .state import TrainState
from .tasks import ClassificationConfig, ClassificationTask
from .trainer import RunResult, Trainer, TrainerConfig
from .types import Batch, EvalLoader, EvalOutput, Loader, Metric, StepOutput, StepReport, Task, Window

__all__ = [
    "Batch", "BatchConfig", "BatchPlan", "Callback", "CheckpointConfig", "CheckpointError",
    "ClassificationConfig", "ClassificationTask", "ConfigError", "ConfusionMatrix", "DataError",
    "DatasetEvalLoader", "DatasetLoader", "DivergedError", "EvalLoader", "EvalOutput", "EvaluateMetric",
    "Evaluator", "ExitCode", "Loader", "MeanLoss", "Metric", "OptimizerConfig", "OutputError", "ProcessError",
    "RecipeConfig", "Run", "RunConfig", "RunResult", "RuntimeConfig", "SampleReader", "Schedule",
    "ScheduleConfig", "StepOutput", "StepReport", "Task", "TopKAccuracy", "TrainState", "Trainer", "TrainerConfig",
    "UserError", "Window", "all_gather", "all_reduce", "barrier", "broadcast", "build_dataset_loaders",
    "build_optimizer", "build_schedule", "build_trainer", "launch", "load_config", "main", "main_process_first",
    "parse_config", "reduce_mean", "reduce_sum", "save_config", "scatter", "start_run",
]  # fmt: skip
