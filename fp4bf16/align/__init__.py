"""Alignment: rewards, judges, guards; rollouts that explore cheaply and regenerate in full; the objectives
Diffusion-DPO, DiffusionNFT and DDPO (PPO).
"""

from .advantages import advantages
from .classes import ClassNetwork
from .dpo import DPOResult, dpo_backward, dpo_loss
from .efficientnet import EfficientNetLite0
from .fidelity import rank_fidelity, spearman
from .guards import Guards
from .judges import Judge, train_judge
from .measures import Captioned, Learning, PanelData
from .nft import NFTSettings, nft_backward, nft_loss
from .panel import Panel
from .pool import Journal, Pool, digest_of, explore
from .ppo import Trajectories, log_probability, ppo_backward, ppo_loss, step_table
from .rewards import Reward, score
from .rollout import Pairs, Rollout, Settings, choose_prompts, healthy, measure_fidelity, rollout, select
from .workers import Explorer

__all__ = [
    "Captioned",
    "ClassNetwork",
    "EfficientNetLite0",
    "Explorer",
    "Journal",
    "Learning",
    "Pairs",
    "Panel",
    "PanelData",
    "Pool",
    "digest_of",
    "explore",
    "DPOResult",
    "Guards",
    "Judge",
    "NFTSettings",
    "Reward",
    "Rollout",
    "Settings",
    "Trajectories",
    "advantages",
    "choose_prompts",
    "dpo_backward",
    "dpo_loss",
    "healthy",
    "log_probability",
    "measure_fidelity",
    "nft_backward",
    "nft_loss",
    "ppo_backward",
    "ppo_loss",
    "rank_fidelity",
    "rollout",
    "score",
    "select",
    "spearman",
    "step_table",
    "train_judge",
]
