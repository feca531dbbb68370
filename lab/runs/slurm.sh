#!/bin/bash
#SBATCH --job-name=small --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=12:00:00
#SBATCH --signal=TERM@120               # SIGTERM to torchrun two minutes before the time limit
#SBATCH --requeue                       # after the failure of a node, the job starts again
#SBATCH --array=1-20%1                  # up to twenty such jobs, each of which goes on where the last one stopped

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1         # else restarted processes may wait for dead ones (pytorch#135712)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100           # seconds to save after SIGTERM, 30 by default
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max_restarts=3 \
  --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$first:29500" \
  train.py --size small --data data --resume
