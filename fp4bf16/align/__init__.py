"""Alignment: rewards and judges, guards, rollouts that explore cheaply and regenerate in full, and
Diffusion-DPO.
"""
