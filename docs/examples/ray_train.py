"""A run on a Ray cluster: `python ray_train.py RECIPE --run-dir SHARED_FOLDER`, with NUM_WORKERS in the environment."""

import os
import subprocess
import sys

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_rank(config):
    """Train as the rank that Ray has set in RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR."""
    # Ray's own process group has MASTER_PORT.
    env = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
    command = [sys.executable, "-m", "dstrain.cli", "train", *config["arguments"]]
    subprocess.run(command, env=env, check=True)


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=int(os.environ.get("NUM_WORKERS", "1")), use_gpu="NO_GPU" not in os.environ)
    TorchTrainer(train_rank, train_loop_config={"arguments": sys.argv[1:]}, scaling_config=workers).fit()
