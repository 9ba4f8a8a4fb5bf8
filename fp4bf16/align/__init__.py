"""Alignment: rewards, judges, guards; rollouts that explore cheaply and regenerate in full; Diffusion-DPO."""

from .dpo import DPOResult, dpo_backward, dpo_loss
from .fidelity import rank_fidelity, spearman
from .guards import Guards
from .judges import Judge, train_judge
from .rewards import Reward, score
from .rollout import Rollout, Settings, choose_prompts, healthy, measure_fidelity, rollout, select

__all__ = [
    "DPOResult",
    "Guards",
    "Judge",
    "Reward",
    "Rollout",
    "Settings",
    "choose_prompts",
    "dpo_backward",
    "dpo_loss",
    "healthy",
    "measure_fidelity",
    "rank_fidelity",
    "rollout",
    "score",
    "select",
    "spearman",
    "train_judge",
]
