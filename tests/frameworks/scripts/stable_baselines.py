"""Reinforcement learning by stable-baselines3, which has no DataLoader: PPO, DQN or SAC."""

from __future__ import annotations

import sys

import digest
from stable_baselines3 import DQN, PPO, SAC

if sys.argv[1] == "ppo":
    learner = PPO("MlpPolicy", "CartPole-v1", seed=1, n_steps=128, batch_size=32, n_epochs=3, device="cpu")
    learner.learn(600)
elif sys.argv[1] == "dqn":
    learner = DQN("MlpPolicy", "CartPole-v1", seed=1, learning_starts=50, buffer_size=1000, device="cpu")
    learner.learn(800)
else:
    learner = SAC("MlpPolicy", "Pendulum-v1", seed=1, learning_starts=50, buffer_size=1000, device="cpu")
    learner.learn(250)
parameters = learner.get_parameters()
digest.tell(*(parameters[name] for name in sorted(parameters)))
