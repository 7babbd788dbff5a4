"""The public names of the package."""

from .callbacks.plateau import ReduceLROnPlateau
from .checkpoint.config import CheckpointConfig
from .cli.flags.parser import load_config, parse_config, save_config
from .cli.recipe.main import main
from .core.batch_plan import BatchConfig, BatchPlan
from .core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ExitCode,
    OneLineError,
    OutputError,
    Preempted,
    ProcessError,
    UserError,
)
from .core.history import read_history
from .core.learning_rate import Schedule
from .core.train_state import TrainState
from .core.types import (
    Batch,
    Gradients,
    Loader,
    Metric,
    Position,
    Samples,
    StepBatch,
    StepOutput,
    StepReport,
    Task,
)
from .data.loader import (
    DatasetOptions,
    EvalLoader,
    TrainLoader,
    build_eval_loader,
    build_train_loader,
)
from .data.reader import Reader
from .data.split import fold, split
from .data.stream import StreamReader
from .data.workers import SampleReader
from .distributed.accelerator import RuntimeConfig
from .distributed.differentiable import gather_with_gradient
from .distributed.launch import launch
from .optim.config import OptimizerConfig
from .optim.lr_scheduler import ScheduleConfig, build_schedule, schedule_from_torch
from .optim.optimizers import build_optimizer
from .own_loop.start import exact_run
from .run.build import build_trainer
from .run.config import RecipeConfig, RunConfig
from .run.session import Run, start_run
from .training.callback import Callback, RunResult, TrainerView
from .training.config import TrainerConfig
from .training.evaluation.evaluation import Evaluation, run_evaluation
from .training.evaluation.evaluator import Evaluator
from .training.evaluation.metric_adapters import TorchMetric, WholeSetMetric
from .training.evaluation.metrics import ConfusionMatrix, MeanLoss, MeanNumber, TopKAccuracy
from .training.tasks.tasks import (
    ClassificationConfig,
    ClassificationTask,
    MultiLabelTask,
    RegressionTask,
)
from .training.trainer import Trainer

__all__ = [
    "Batch",
    "BatchConfig",
    "BatchPlan",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "ClassificationConfig",
    "ClassificationTask",
    "ConfigError",
    "ConfusionMatrix",
    "DataError",
    "DatasetOptions",
    "DivergedError",
    "EvalLoader",
    "Evaluation",
    "Evaluator",
    "ExitCode",
    "Gradients",
    "Loader",
    "MeanLoss",
    "MeanNumber",
    "Metric",
    "MultiLabelTask",
    "OneLineError",
    "OptimizerConfig",
    "OutputError",
    "Position",
    "Preempted",
    "ProcessError",
    "Reader",
    "ReduceLROnPlateau",
    "RecipeConfig",
    "RegressionTask",
    "Run",
    "RunConfig",
    "RunResult",
    "RuntimeConfig",
    "SampleReader",
    "Samples",
    "Schedule",
    "ScheduleConfig",
    "StepBatch",
    "StepOutput",
    "StepReport",
    "StreamReader",
    "Task",
    "TopKAccuracy",
    "TorchMetric",
    "TrainLoader",
    "TrainState",
    "Trainer",
    "TrainerConfig",
    "TrainerView",
    "UserError",
    "WholeSetMetric",
    "build_eval_loader",
    "build_optimizer",
    "build_schedule",
    "build_train_loader",
    "build_trainer",
    "exact_run",
    "fold",
    "gather_with_gradient",
    "launch",
    "load_config",
    "main",
    "parse_config",
    "read_history",
    "run_evaluation",
    "save_config",
    "schedule_from_torch",
    "split",
    "start_run",
]
