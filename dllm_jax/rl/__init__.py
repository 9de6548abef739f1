"""Rollouts, rewards, advantages, views and the one learner."""
