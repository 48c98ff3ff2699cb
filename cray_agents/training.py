"""Names for training without a loop: jobs, sessions of an own loop, datasets.

from cray_agents.training import Hyperparameters, Lora, TrainingSession
"""

from typing import TYPE_CHECKING

from cray_agents.lazy_names import lazy_names

if TYPE_CHECKING:
    from cray_agents.platform.training_session import TrainingSession as TrainingSession
    from cray_agents.queries import DatasetRecipe as DatasetRecipe
    from cray_agents.queries import RunFilter as RunFilter
    from cray_agents.records import ModelVersion as ModelVersion
    from cray_agents.records import Split as Split
    from cray_agents.training_commands import Datum as Datum
    from cray_agents.training_jobs import Hyperparameters as Hyperparameters
    from cray_agents.training_jobs import JobSpec as JobSpec
    from cray_agents.training_jobs import JobStatus as JobStatus
    from cray_agents.training_jobs import Layout as Layout
    from cray_agents.training_jobs import Lora as Lora
    from cray_agents.training_jobs import Policy as Policy
    from cray_agents.training_jobs import Preference as Preference

__getattr__, __all__ = lazy_names(__name__, __file__)
