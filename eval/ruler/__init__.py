"""RULER's synthetic long-context tasks, checkpoints side by side on the same prompts."""

from ropex.eval.ruler.evaluate import evaluate_ruler
from ropex.eval.ruler.tasks import TASKS

__all__ = ["TASKS", "evaluate_ruler"]
